"""The expert cache (paper §4.4): which expert lies in which slot, who needs it, who may be evicted.

Owns slots, entries and reference counts, and asks the eviction policy for victims.  Does not know
when a fetch starts or ends in time, nor which job runs next.

An entry lives through: reserved (pinned, its fetch queued) -> started (its fetch in flight) ->
resident.  It is evictable while it is resident, nobody holds a reference and no policy holds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from policies.core.progress import Job
from policies.core.protocols import EvictionPolicy
from policies.core.types import ExpertId


@dataclass(eq=False, slots=True)
class Entry:
    """One expert's place.  ``refs``: unfinished jobs that need it; ``waiters``: those still waiting."""

    slot: int
    refs: int = 0
    resident: bool = False
    started: bool = False
    held: bool = False
    waiters: list[Job] = field(default_factory=list)


class ExpertCache:
    """``capacity`` slots of one expert each, shared by all layers."""

    def __init__(self, capacity: int, eviction: EvictionPolicy) -> None:
        self.capacity = capacity
        self.eviction = eviction
        self.entries: dict[ExpertId, Entry] = {}
        self.evictable: dict[ExpertId, None] = {}
        self.free = list(range(capacity - 1, -1, -1))
        self._held: dict[ExpertId, None] = {}

    def pin(self, uses: Mapping[ExpertId, int]) -> tuple[list[ExpertId], list[tuple[ExpertId, Entry]]]:
        """A job needs these experts, each for so many of its requests.

        Takes a reference on each entry that is there.  Returns the absent experts, which want
        ``reserve``, and the pending ones with their entries.
        """
        entries, evictable, touch = self.entries, self.evictable, self.eviction.touch
        absent: list[ExpertId] = []
        pending: list[tuple[ExpertId, Entry]] = []
        for expert, count in uses.items():
            entry = entries.get(expert)
            if entry is None:
                absent.append(expert)
                continue
            touch(expert, count)
            refs = entry.refs
            if not refs:
                evictable.pop(expert, None)
                if entry.held:
                    self._drop_hold(expert, entry)
            entry.refs = refs + 1
            if not entry.resident:
                pending.append((expert, entry))
        return absent, pending

    def reserve(self, expert: ExpertId, uses: int) -> Entry | None:
        """Take and pin an entry for an absent expert, evicting; None if every slot is needed."""
        slot = self._slot_for(expert)
        while slot is None and self._held:
            self.release_holds()
            slot = self._slot_for(expert)
        if slot is None:
            return None
        self.eviction.touch(expert, uses)
        entry = self.entries[expert] = Entry(slot, refs=1)
        return entry

    def reserve_prefetch(self, expert: ExpertId, hold: bool) -> Entry | None:
        """Take an entry for a predicted expert from free or evictable ones only."""
        slot = self._slot_for(expert)
        if slot is None:
            return None
        self.eviction.admit(expert)
        entry = self.entries[expert] = Entry(slot, held=hold)
        if hold:
            self._held[expert] = None
        return entry

    def fill(self, expert: ExpertId) -> list[Job]:
        """The fetch has landed: the entry is resident.  Returns the jobs that waited for it."""
        entry = self.entries[expert]
        entry.resident = True
        waiters, entry.waiters = entry.waiters, []
        if entry.refs == 0 and not entry.held:
            self._let_go(expert)
        return waiters

    def unpin(self, experts: Iterable[ExpertId]) -> None:
        """A job that needed these experts has left the GPU."""
        entries, evictable, release = self.entries, self.evictable, self.eviction.release
        for expert in experts:
            entry = entries[expert]
            entry.refs = refs = entry.refs - 1
            if not refs:
                evictable[expert] = None
                release(expert)

    def release_holds(self, below: ExpertId | None = None) -> None:
        """End the hold of prefetched experts with ids under ``below`` (None: of all)."""
        for expert in [e for e in self._held if below is None or e < below]:
            entry = self.entries[expert]
            self._drop_hold(expert, entry)
            if entry.resident and entry.refs == 0:
                self._let_go(expert)

    @property
    def holds_any(self) -> bool:
        """True if a prefetched expert is kept for its layer."""
        return bool(self._held)

    def _let_go(self, expert: ExpertId) -> None:
        self.evictable[expert] = None
        self.eviction.release(expert)

    def _drop_hold(self, expert: ExpertId, entry: Entry) -> None:
        entry.held = False
        del self._held[expert]

    def _slot_for(self, incoming: ExpertId) -> int | None:
        if self.free and not self.eviction.full(incoming):
            return self.free.pop()
        if not self.evictable:
            return None
        victim = self.eviction.victim(self.evictable, incoming)
        if victim is None:
            return None
        del self.evictable[victim]
        self.eviction.forget(victim)
        return self.entries.pop(victim).slot

    def check(self, jobs: dict[int, Job]) -> None:
        """Assert the invariants of the cache against the unfinished jobs."""
        references = dict.fromkeys(self.entries, 0)
        for job in jobs.values():
            for expert in job.needs:
                references[expert] += 1
        slots = [entry.slot for entry in self.entries.values()]
        assert len(slots) + len(self.free) == self.capacity, "entries and free slots do not add up to the capacity"
        assert len({*slots, *self.free}) == self.capacity, "one slot holds two experts"
        for expert, entry in self.entries.items():
            assert entry.refs == references[expert], (
                f"expert {expert}: {entry.refs} references, {references[expert]} jobs"
            )
            idle = entry.resident and entry.refs == 0 and not entry.held
            assert idle == (expert in self.evictable), f"expert {expert}: wrongly listed as evictable or not"
            assert not (entry.resident and entry.waiters), f"expert {expert} is resident and jobs wait for it"
            assert entry.held == (expert in self._held), f"expert {expert}: hold and its list disagree"
        assert self.evictable.keys() <= self.entries.keys(), "an evictable expert is not in the cache"
