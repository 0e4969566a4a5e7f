"""The offline optimum: what a cache could hold back if it knew the future (Belady 1966)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush

from policies.core.types import ExpertId, UserError
from policies.eviction.smallest import SmallestFirst

_NEVER = 1 << 62
_SLACK = 1024


class Belady(SmallestFirst):
    """The expert whose next use is farthest leaves first; every miss is inserted.

    ``batches``: the whole future, the distinct experts of each (step, layer) lookup in lockstep
    order.  A batch is looked up as one with its union pinned, so no lockstep policy has fewer misses.
    Under runahead the requests reach layers in another order than ``batches`` says: there it is a
    bound on the serial order only, and a run may miss less.

    Between two ``begin_step`` an expert counts as used once, in however many jobs; without any
    ``begin_step`` each touch is a use.
    """

    def __init__(self, batches: Iterable[Iterable[ExpertId]]) -> None:
        super().__init__()
        self._uses: dict[ExpertId, list[int]] = {}
        for position, batch in enumerate(batches):
            for expert in batch:
                self._uses.setdefault(expert, []).append(position)
        for positions in self._uses.values():
            positions.reverse()  # the next use is the last item
        self._step: int | None = None
        self._used_in_step: dict[ExpertId, int] = {}

    def begin_step(self, step: int) -> None:
        """Each expert may be used once more."""
        self._step = step

    def touch(self, expert: ExpertId, uses: int) -> None:
        """This use is past; the entry is of the next one."""
        if self._step is None:
            self._pass_use(expert)
        elif self._used_in_step.get(expert) != self._step:
            self._used_in_step[expert] = self._step
            self._pass_use(expert)
        self.admit(expert)

    def admit(self, expert: ExpertId) -> None:
        """Enter with its next use."""
        future = self._uses.get(expert)
        self._entries[expert] = (-future[-1] if future else -_NEVER, expert)

    def lockstep(self, capacity: int) -> Callable[[Sequence[ExpertId]], int]:
        """Whole batches for the untimed walk, one use of each expert: those of a batch are the last to leave."""
        uses, pass_use = self._uses, self._pass_use
        present: dict[ExpertId, int] = {}  # the next use, negative: the farthest is the smallest
        heap: list[tuple[int, ExpertId]] = []  # entries that ``present`` does not confirm are out of date

        def lookup(batch: Sequence[ExpertId]) -> int:
            hits = sum([expert in present for expert in batch])
            for _ in range(len(present) + len(batch) - hits - capacity):
                use, expert = heappop(heap)
                while present.get(expert) != use:
                    use, expert = heappop(heap)
                del present[expert]
            if len(heap) > 2 * len(present) + _SLACK:
                heap[:] = [(use, expert) for expert, use in present.items()]
                heapify(heap)
            for expert in batch:
                pass_use(expert)
                future = uses[expert]
                use = present[expert] = -future[-1] if future else -_NEVER
                heappush(heap, (use, expert))
            return hits

        return lookup

    def _pass_use(self, expert: ExpertId) -> None:
        try:
            self._uses[expert].pop()
        except (KeyError, IndexError):
            raise UserError(
                f"Belady: expert {expert} is used more often than its batches say; give it the batches of this very run"
            ) from None
