"""CUDA graphs of every entry, job and head, for each size of group; or the same launches without graphs.

Owns the graphs of one job slot.  Nothing in a graph depends on data: the first node copies the descriptor, and kernels
read rows, slots and positions from there.  Not needed for the result: launched one by one, the same kernels give the
same bits, only the host takes longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from executor.cuda_driver import checked, cuda_driver
from executor.fast.buffers import Buffers
from executor.fast.steps import Steps
from policies.core.types import Phase

Key = tuple[Phase, int, int]
"""Phase, layer (of the MoE; 0 for entry and head) and padded size."""


def sizes_up_to(tile: int) -> tuple[int, ...]:
    """Padded sizes of groups: powers of two.  A group costs what the next of these costs."""
    return tuple(1 << i for i in range(tile.bit_length()) if 1 << i <= tile)


class JobGraphs:
    """Runs any job of one job slot.  ``padded[n]``: the size that a group of ``n`` runs in.

    ``graphs``: capture all of them now, on the current stream, which must be the one they will run on: libraries
    keep a workspace for each stream.  ``graph_bytes`` and ``capture_s``: what that took.
    """

    def __init__(self, steps: Steps, buffers: Buffers, *, graphs: bool) -> None:
        self._steps, self.buffers = steps, buffers
        self.sizes = sizes_up_to(buffers.tile)
        self.padded = [next(size for size in self.sizes if size >= n) for n in range(buffers.tile + 1)]
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._handles: dict[int, int] = {}
        self.graph_bytes, self.capture_s = 0, 0.0
        if graphs:
            self._capture()
            self._launch_graph = cuda_driver().cuGraphLaunch

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, phase: Phase, layer: int, n: int, stream: int) -> None:
        """Launch for a group padded to ``n``, one of ``sizes``.

        ``stream``: CUDA's handle of the stream that a graph is launched on; without graphs it must be the current one.
        """
        if self._handles:
            checked(self._launch_graph(self._handles[_number(phase, layer, n)], stream))
        else:
            self._launch((phase, layer, n))()

    def _launch(self, key: Key) -> Callable[[], None]:
        phase, layer, n = key
        if phase is Phase.JOB:
            return partial(self._steps.job, self.buffers, n, layer)
        return partial(self._steps.entry if phase is Phase.ENTRY else self._steps.head, self.buffers, n)

    def _keys(self) -> Iterator[Key]:
        for n in self.sizes:
            yield Phase.ENTRY, 0, n
            yield from ((Phase.JOB, layer, n) for layer in range(len(self._steps.plan.layers)))
            yield Phase.HEAD, 0, n

    def _capture(self) -> None:
        """Launch everything once with padding only, which compiles the kernels and changes nothing; then capture."""
        began_s = time.perf_counter()
        device = self.buffers.device
        for key in self._keys():
            self._launch(key)()
        torch.cuda.synchronize(device)
        free = torch.cuda.mem_get_info(device)[0]
        pool = torch.cuda.graph_pool_handle()
        for key in self._keys():
            graph = torch.cuda.CUDAGraph()
            # Other threads may use the device meanwhile; torch.cuda.graph would also collect garbage for every graph.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            self._launch(key)()
            graph.capture_end()
            self._graphs[_number(*key)] = graph
            self._handles[_number(*key)] = graph.raw_cuda_graph_exec()
        torch.cuda.synchronize(device)
        self.graph_bytes = free - torch.cuda.mem_get_info(device)[0]
        self.capture_s = time.perf_counter() - began_s


def _number(phase: Phase, layer: int, n: int) -> int:
    """A key that hashes at once; that of an enum's member is computed in Python each time."""
    return (layer << 8 | n) << 2 | phase
