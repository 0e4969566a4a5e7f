"""The decoder's three pieces, each cut in two: launch it, and later collect what its gates chose.

Works on the requests and states of a ``executor.model.Decoder``, which opens, feeds, prefills and closes them as
before.  Owns the job slots: what one job in flight needs.  Does not know which expert lies where, or who is scheduled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from executor.cache import KvCache
from executor.fast.buffers import Buffers
from executor.fast.descriptor import SEQUENCE_LIMIT, ints
from executor.fast.families import plan_of
from executor.fast.graphs import JobGraphs
from executor.fast.ops import Ops
from executor.fast.steps import Steps
from executor.geometry import ExpertGeometry
from executor.kernels.values import TAG_BITS, ExpertsShape
from executor.model import Decoder
from executor.rows import check_products
from policies.core.messages import Prediction
from policies.core.types import ExpertId, ModelSpec, Phase, RequestId, UserError

_ID_MASK = (1 << TAG_BITS) - 1


def check_sizes(spec: ModelSpec, requests: int, tile: int) -> None:
    """Raise UserError for more requests or experts than one job's descriptor and ids have room for."""
    if requests > tile:
        raise UserError(
            f"kernels=triton runs at most {tile} requests at a time, concurrency is {requests}; lower it, or set "
            f"kernels=torch"
        )
    if spec.n_experts > _ID_MASK + 1:
        raise UserError(
            f"kernels=triton is built for at most {_ID_MASK + 1} experts a layer, this model has {spec.n_experts}; "
            f"set kernels=torch"
        )


@dataclass(frozen=True, slots=True)
class Gates:
    """What the gates of a layer chose, in the order of the requests: ids of the whole model, best first.

    ``predicted``, ``foreign``: as in ``executor.model.Routing``.
    """

    experts: list[tuple[ExpertId, ...]]
    predicted: list[tuple[Prediction, ...]]
    foreign: int = 0


@dataclass(slots=True)
class _Flight:
    """The job that a slot has in flight; ``layer``: of its gates, None if it has none."""

    layer: int | None
    members: list[Any]
    given: Sequence[Sequence[ExpertId]] | None
    sequence: int


class JobSlot:
    """Everything that one job in flight needs, its stream included."""

    def __init__(self, steps: Steps, buffers: Buffers, stream: torch.cuda.Stream | None, *, graphs: bool) -> None:
        self.stream, self.buffers = stream, buffers
        self.handle = 0 if stream is None else stream.cuda_stream
        with torch.cuda.stream(stream):
            self.graphs = JobGraphs(steps, buffers, graphs=graphs)
        self.ids = memoryview(buffers.ids.numpy()).cast("B")
        self.ahead_ids, self.ahead_scores = buffers.ahead_ids.numpy(), buffers.ahead_scores.numpy()
        self.flight: _Flight | None = None

    def enter(self) -> None:
        """Make this slot's stream the thread's current one."""
        if self.stream is not None:
            torch.cuda.set_stream(self.stream)

    def run(self, phase: Phase, layer: int, n: int) -> None:
        """Launch what the descriptor tells, on this slot's stream; see ``JobGraphs.run``."""
        if not len(self.graphs):
            self.enter()
        self.graphs.run(phase, layer, n, self.handle)

    @property
    def done(self) -> bool:
        """Whether all that was launched has run."""
        return self.stream is None or self.stream.query()

    def wait(self) -> None:
        """Until then; lets other threads run."""
        if self.stream is not None:
            self.stream.synchronize()


class FastDecoder:
    """``arena``: uint8, slot s at ``s * geometry.stride_bytes``.  ``job_slots``: jobs in flight at most.

    ``graphs``: capture all jobs now (CUDA only).  The caller enters ``torch.inference_mode``.

    Raises UserError where a part that the decoder uses is not built here.
    """

    def __init__(
        self,
        decoder: Decoder,
        arena: Tensor,
        geometry: ExpertGeometry,
        ops: Ops,
        *,
        job_slots: int = 1,
        graphs: bool = True,
    ) -> None:
        check_sizes(decoder.spec, decoder.max_requests, decoder.tile)
        self.decoder, self.plan = decoder, plan_of(decoder)
        shape = ExpertsShape(geometry, decoder.spec.top_k, self.plan.activation)
        self._steps = Steps(self.plan, ops, arena, shape, decoder.max_requests)
        cuda = decoder.device.type == "cuda"
        buffers = [Buffers(self.plan, shape, decoder.tile, decoder.device) for _ in range(job_slots)]
        if cuda:
            torch.cuda.synchronize(decoder.device)  # weights, states and buffers were filled on other streams
        self.slots = [
            JobSlot(self._steps, own, torch.cuda.Stream(decoder.device) if cuda else None, graphs=graphs)
            for own in buffers
        ]
        self._sequence = 0

    # ------------------------------------------------------------------ launch

    def launch(
        self,
        slot: JobSlot,
        phase: Phase,
        layer: int,
        requests: Sequence[RequestId],
        slot_of: Mapping[ExpertId, int],
        *,
        given: Sequence[Sequence[ExpertId]] | None = None,
    ) -> None:
        """Start a job in a job slot that has none.

        ``layer``: of the MoE, -1 for an entry.  ``slot_of``: where each expert lies that the group needs.  ``given``:
        experts that replay imposes on the gates of layer + 1.
        """
        table, gates_layer = self.decoder.requests, layer + 1
        members = [table[request] for request in requests]
        rows = [member.slot for member in members]
        n = slot.graphs.padded[len(rows)]
        self._sequence = (self._sequence + 1) % SEQUENCE_LIMIT
        descriptor = slot.buffers.descriptor
        gates = phase is not Phase.HEAD and gates_layer < len(self.plan.layers)
        tokens: Sequence[int] = ()
        slots: Sequence[int] = ()
        positions: Sequence[int] = ()
        at: Sequence[int] = ()
        first: Sequence[int] = ()
        end: Sequence[int] = ()
        if phase is Phase.ENTRY:
            tokens = [member.token for member in members]
        elif phase is Phase.JOB:
            slots = [slot_of[expert] for member in members for expert in member.chosen]
        if gates:
            positions = [member.position for member in members]
            state = self.decoder.states[gates_layer]
            if isinstance(state, KvCache):
                if state.window is not None:
                    slot.enter()  # it may have to move what is kept
                at, first, end = state.places(rows, positions)
            low = gates_layer * self.plan.n_experts
            descriptor.impose(None if given is None else [expert - low for one in given for expert in one])
        descriptor.tell(self._sequence, n, rows, tokens, positions, at, first, end, slots)
        slot.run(phase, layer if phase is Phase.JOB else 0, n)
        slot.flight = _Flight(gates_layer if gates else None, members, given, self._sequence)

    # ------------------------------------------------------------------ collect

    def collect(self, slot: JobSlot) -> Gates | None:
        """What the gates of the job in ``slot`` chose, once it has run; None if it had none.  The slot is free then."""
        flight, slot.flight = slot.flight, None
        assert flight is not None
        if flight.layer is None:
            return None
        n, k, tag = len(flight.members), self.plan.top_k, flight.sequence << TAG_BITS
        words = ints(n * k).unpack_from(slot.ids)  # for so few, arrays take longer
        if min(words) < tag or max(words) > tag + _ID_MASK:
            raise RuntimeError(f"job {flight.sequence} has ended without its experts; the run is broken")
        base = flight.layer * self.plan.n_experts - tag
        ids = [word + base for word in words]
        own = [tuple(ids[first : first + k]) for first in range(0, n * k, k)]
        experts, foreign = own, 0
        if flight.given is not None:
            experts = [*map(tuple, flight.given)]
            foreign = sum([len({*chosen}.difference(gate)) for chosen, gate in zip(experts, own, strict=True)])
        for member, chosen in zip(flight.members, experts, strict=True):
            member.chosen = chosen
        return Gates(experts, self._predicted(slot, flight.layer, n), foreign)

    def _predicted(self, slot: JobSlot, layer: int, n: int) -> list[tuple[Prediction, ...]]:
        if not self.plan.predict or layer + 1 == len(self.plan.layers):
            return [()] * n
        base = (layer + 1) * self.plan.n_experts
        ids, scores = (slot.ahead_ids[:n] + base).tolist(), slot.ahead_scores[:n].tolist()
        return [tuple(zip(*row, strict=True)) for row in zip(ids, scores, strict=True)]

    def logits(self, slot: JobSlot) -> Tensor:
        """[n, V] of the head that has run, or runs, in ``slot``; on its stream, until the slot's next head."""
        assert slot.flight is not None
        return slot.buffers.vocabulary[: len(slot.flight.members)]

    # ------------------------------------------------------------------ facts

    def check_rows(self) -> int:
        """Test the row rule on the merged products; returns how many.  Raises RowRuleError."""
        weights = [("head", self.plan.head)]
        for i, layer in enumerate(self.plan.layers):
            a = layer.attention
            weights += [(f"layer {i} attention", a.qkv if hasattr(a, "qkv") else a.projection)]
            weights += [(f"layer {i} output", a.out), (f"layer {i} router", layer.router.weight)]
            if layer.dense is not None:
                weights += [(f"layer {i} gate_up", layer.dense.gate_up), (f"layer {i} down", layer.dense.down)]
        return check_products(weights, self.decoder.tile)

    def describe(self) -> dict[str, Any]:
        """For a run's summary."""
        return {
            "job_slots": len(self.slots),
            "graphs": sum(len(slot.graphs) for slot in self.slots),
            "graph_bytes": sum(slot.graphs.graph_bytes for slot in self.slots),
            "capture_s": sum(slot.graphs.capture_s for slot in self.slots),
        }
