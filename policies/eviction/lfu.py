"""Least frequently used, with counts that outlive eviction, die with it, or decay."""

from __future__ import annotations

from typing import Literal, get_args

from policies.core.types import ExpertId, UserError
from policies.eviction.smallest import SmallestFirst

Count = Literal["keep", "in_cache", "decay"]

_RESCALE_AT = 2.0**500


class LFU(SmallestFirst):
    """The expert with the fewest token uses leaves first; among equals the one used longest ago.

    A use by three requests of a step counts three.  ``count`` says what becomes of the counts:

    - ``keep``: they outlive eviction (design ruling 2; the default);
    - ``in_cache``: they restart at every entry into the cache;
    - ``decay``: they outlive eviction and halve every ``half_life_steps`` steps.

    A prefetched expert enters with the count it has, as if used last at that moment.
    """

    def __init__(self, count: Count = "keep", half_life_steps: int | None = None) -> None:
        super().__init__()
        if count not in get_args(Count):
            raise UserError(f"LFU: count is {count!r}, expected one of {', '.join(get_args(Count))}")
        if (count == "decay") != (half_life_steps is not None):
            raise UserError(
                f"LFU: half_life_steps is {half_life_steps} with count={count}; give it with count=decay and only there"
            )
        if half_life_steps is not None and (not isinstance(half_life_steps, int) or half_life_steps < 1):
            raise UserError(f"LFU: half_life_steps is {half_life_steps!r}, expected a whole number of at least 1")
        self._keep = count != "in_cache"
        self._half_life_steps = half_life_steps
        self._steps = 0
        self._weight: float = 1
        self._tick = 0

    def begin_step(self, step: int) -> None:
        """Let all counts decay, by doubling the weight of later uses: the order is the same."""
        if self._half_life_steps is None:
            return
        if self._steps and self._steps % self._half_life_steps == 0:
            self._weight *= 2
            if self._weight >= _RESCALE_AT:
                self._rescale()
        self._steps += 1

    def touch(self, expert: ExpertId, uses: int) -> None:
        """Count the uses."""
        self._tick = tick = self._tick + 1
        entry = self._entries.get(expert)
        used = uses * self._weight
        self._entries[expert] = (used, tick, expert) if entry is None else (entry[0] + used, tick, expert)

    def admit(self, expert: ExpertId) -> None:
        """Enter without a use."""
        self.touch(expert, 0)

    def forget(self, expert: ExpertId) -> None:
        """Keep the count or lose it."""
        if self._keep:
            self._items.pop(expert, None)
        else:
            super().forget(expert)

    def _rescale(self) -> None:
        """Divide all counts by the present weight, long before a float overflows."""
        scale = 1 / self._weight  # a power of two: exact
        candidates = [expert for expert in self._items if self._released[expert] is self._entries[expert]]
        self._entries = {expert: (count * scale, tick, expert) for expert, (count, tick, _) in self._entries.items()}
        self._items, self._released, self._heap = {}, {}, []
        self._weight = 1.0
        for expert in candidates:
            self.release(expert)
