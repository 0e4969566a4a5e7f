"""Least-Stale of SpecMD (arXiv 2602.03921), in both published readings.

No official code is public; the paper's rule is: layers are visited in order and never twice in a
pass, so recency misleads, and what was not used in this pass goes first.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict
from collections.abc import Container
from typing import Literal, get_args

from policies.core.messages import Gate
from policies.core.protocols import EvictionPolicy
from policies.core.types import ExpertId, RequestId, UserError

Order = Literal["spatial", "fifo"]
LeftOrder = Literal["leftmost", "just_passed"]


class _Shelf:
    """Experts by layer, the oldest use first within a layer, and which layers have any (a bit each)."""

    __slots__ = ("layers", "mask")

    def __init__(self) -> None:
        self.layers: defaultdict[int, OrderedDict[ExpertId, None]] = defaultdict(OrderedDict)
        self.mask = 0

    def put(self, layer: int, expert: ExpertId) -> None:
        self.layers[layer][expert] = None
        self.mask |= 1 << layer

    def remove(self, layer: int, expert: ExpertId) -> None:
        experts = self.layers[layer]
        del experts[expert]
        if not experts:
            self.mask ^= 1 << layer


class LeastStale(EvictionPolicy):
    """Experts not used in this pass (*stale*) leave before those used in it (*current*).

    A pass is a step; the current layer is that of the latest gate, also for a prefetched expert, which enters as
    current: a prefetch for the next layer must not push out what that layer is about to ask for.  (Until a gate of the
    step is observed, the incoming expert's layer stands for it.)  Among the stale, and then among the current,
    ``order`` decides:

    - ``spatial``: layers up to the current one first, then those beyond it, the farthest of them
      first; of the former the lowest layer first (``left_order=leftmost``) or the nearest, whose next
      use is the farthest (``just_passed``); within a layer the one used longest ago.
    - ``fifo``: the one used longest ago, whatever its layer.  In lockstep this is LRU.
    """

    def __init__(self, n_experts: int, order: Order = "spatial", left_order: LeftOrder = "leftmost") -> None:
        if order not in get_args(Order):
            raise UserError(f"LeastStale: order is {order!r}, expected one of {', '.join(get_args(Order))}")
        if left_order not in get_args(LeftOrder):
            raise UserError(
                f"LeastStale: left_order is {left_order!r}, expected one of {', '.join(get_args(LeftOrder))}"
            )
        # Without layers all experts stand on one shelf board, in the order of use.
        self._experts_a_layer = n_experts if order == "spatial" else sys.maxsize
        self._leftmost = left_order == "leftmost"
        self._stale = _Shelf()
        self._current = _Shelf()
        self._layer: int | None = None  # of the latest gate

    def begin_step(self, step: int) -> None:
        """What was current becomes stale, behind what is stale already."""
        for layer, experts in self._current.layers.items():
            self._stale.layers[layer].update(experts)
        self._stale.mask |= self._current.mask
        self._current = _Shelf()
        self._layer = None

    def observe(self, request: RequestId, gate: Gate) -> None:
        """The computation has come to the gate's layer."""
        self._layer = gate.experts[0] // self._experts_a_layer

    def touch(self, expert: ExpertId, uses: int) -> None:
        """Make it current, and the most recent of its layer."""
        layer = expert // self._experts_a_layer
        current = self._current.layers[layer]
        if expert in current:
            current.move_to_end(expert)
            return
        if expert in self._stale.layers[layer]:
            self._stale.remove(layer, expert)
        self._current.put(layer, expert)

    def admit(self, expert: ExpertId) -> None:
        """Enter as current."""
        self.touch(expert, 0)

    def victim(self, evictable: Container[ExpertId], incoming: ExpertId) -> ExpertId | None:
        """The first member of ``evictable`` in the order of the class."""
        layer = incoming // self._experts_a_layer if self._layer is None else self._layer
        passed = (2 << layer) - 1  # bits of layers up to the current one
        for shelf in (self._stale, self._current):
            for mask, lowest_first in ((shelf.mask & passed, self._leftmost), (shelf.mask & ~passed, False)):
                left = mask
                while left:
                    layer = ((left & -left) if lowest_first else left).bit_length() - 1
                    for expert in shelf.layers[layer]:
                        if expert in evictable:
                            return expert
                    left ^= 1 << layer
        return None

    def forget(self, expert: ExpertId) -> None:
        """Take it off its shelf."""
        layer = expert // self._experts_a_layer
        shelf = self._current if expert in self._current.layers[layer] else self._stale
        shelf.remove(layer, expert)
