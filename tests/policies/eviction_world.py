"""A cache that calls eviction policies as the contract says, and naive references that scan everything."""

from __future__ import annotations

from fractions import Fraction

from policies.core.messages import Gate

N_LAYERS, N_EXPERTS, CAPACITY = 4, 6, 8
SMALLEST_SHARE = CAPACITY // N_LAYERS


class Naive:
    """Remembers every call; ``rank`` orders the candidates, the smallest leaves."""

    def __init__(self):
        self.tick = 0
        self.step = 0
        self.last = {}

    def begin_step(self, step):
        self.step += 1

    def observe(self, request, gate):
        pass

    def touch(self, expert, uses):
        self.tick += 1
        self.last[expert] = self.tick

    def admit(self, expert):
        self.touch(expert, 0)

    def forget(self, expert):
        pass

    def rank(self, expert, incoming):
        raise NotImplementedError

    def victim(self, evictable, incoming):
        return min(evictable, key=lambda expert: self.rank(expert, incoming), default=None)


class NaiveLRU(Naive):
    def rank(self, expert, incoming):
        return self.last[expert]


class NaiveLFU(Naive):
    """Counts as exact fractions that are really halved."""

    def __init__(self, count, half_life_steps=None):
        super().__init__()
        self.count, self.half_life_steps = count, half_life_steps
        self.uses = {}

    def begin_step(self, step):
        if self.half_life_steps and self.step and self.step % self.half_life_steps == 0:
            self.uses = {expert: uses / 2 for expert, uses in self.uses.items()}
        super().begin_step(step)

    def touch(self, expert, uses):
        super().touch(expert, uses)
        self.uses[expert] = self.uses.get(expert, Fraction(0)) + uses

    def forget(self, expert):
        if self.count == "in_cache":
            del self.uses[expert]

    def rank(self, expert, incoming):
        return self.uses[expert], self.last[expert]


class NaiveLeastStale(Naive):
    def __init__(self, order, left_order):
        super().__init__()
        self.order, self.left_order = order, left_order
        self.used_in_step = {}
        self.layer = None

    def begin_step(self, step):
        super().begin_step(step)
        self.layer = None

    def observe(self, request, gate):
        self.layer = gate.experts[0] // N_EXPERTS

    def touch(self, expert, uses):
        super().touch(expert, uses)
        self.used_in_step[expert] = self.step

    def rank(self, expert, incoming):
        current = self.used_in_step[expert] == self.step
        if self.order == "fifo":
            return current, self.last[expert]
        distance = expert // N_EXPERTS - (incoming // N_EXPERTS if self.layer is None else self.layer)
        right = distance > 0
        nearest_first = not right and self.left_order == "just_passed"
        return current, right, abs(distance) if nearest_first else -abs(distance), self.last[expert]


class NaiveFineMoE(Naive):
    def __init__(self, arithmetic):
        super().__init__()
        self.arithmetic = arithmetic
        self.probability, self.visits = {}, {}

    def observe(self, request, gate):
        self.probability.update(dict(gate.predicted))

    def touch(self, expert, uses):
        super().touch(expert, uses)
        self.visits[expert] = self.visits.get(expert, 0) + 1

    def forget(self, expert):
        self.probability.pop(expert, None)
        del self.visits[expert]

    def rank(self, expert, incoming):
        score = self.probability.get(expert, 0.0) * self.visits[expert]
        return int(score) if self.arithmetic == "integer" else score, self.last[expert]


class NaivePerLayer(NaiveLRU):
    def victim(self, evictable, incoming):
        return super().victim([e for e in evictable if e // N_EXPERTS == incoming // N_EXPERTS], incoming)


class SmallCache:
    """Pins, reads and prefetches of several jobs at a time; asks the policy and checks each answer.

    ``naive``: the reference that must name the same victim; None where only the contract is checked.
    """

    def __init__(self, policy, naive):
        self.policy, self.naive = policy, naive
        self.refs, self.resident, self.evictable = {}, set(), {}
        self.jobs = []
        self.victims = []

    def _tell(self, method, *arguments):
        getattr(self.policy, method)(*arguments)
        if self.naive and hasattr(self.naive, method):
            getattr(self.naive, method)(*arguments)

    def _ask(self, evictable, incoming):
        victim = self.policy.victim(evictable, incoming)
        assert victim is None or victim in evictable
        if self.naive:
            assert victim == self.naive.victim(evictable, incoming)
        return victim

    def _make_room(self, incoming):
        """True if there is a slot for ``incoming``."""
        if len(self.refs) < CAPACITY and not self.policy.full(incoming):
            return True
        # Candidates that a caller leaves out are passed over, and not lost.
        self._ask(dict.fromkeys(list(self.evictable)[::2]), incoming)
        assert self.policy.victim({}, incoming) is None
        victim = self._ask(self.evictable, incoming)
        if victim is None:
            return False
        assert self.refs[victim] == 0
        del self.evictable[victim], self.refs[victim]
        self.resident.remove(victim)
        self._tell("forget", victim)
        self.victims.append(victim)
        return True

    def _let_go(self, expert):
        if self.refs[expert] == 0 and expert in self.resident and expert not in self.evictable:
            self.evictable[expert] = None
            self._tell("release", expert)

    def begin_job(self, uses):
        """``uses``: how many requests need each expert, all of one layer.  Does nothing if it cannot fit."""
        pinned = {expert for expert in self.refs if expert not in self.evictable}
        layer = next(iter(uses)) // N_EXPERTS
        room = self.policy.room(layer, CAPACITY)
        of_layer = {expert for expert in pinned | {*uses} if expert // N_EXPERTS == layer}
        if len(pinned | {*uses}) > CAPACITY or len(of_layer) > room:
            return
        self._tell("observe", 0, Gate(tuple(uses)))
        for expert in uses:
            if expert in self.refs:
                self.evictable.pop(expert, None)
                self._tell("touch", expert, uses[expert])
                self.refs[expert] += 1
        for expert in uses:
            if expert not in self.refs:
                assert self._make_room(expert), "no victim although an unpinned entry is there"
                self._tell("touch", expert, uses[expert])
                self.refs[expert] = 1
        self.jobs.append(tuple(uses))

    def prefetch(self, expert):
        if expert not in self.refs and self._make_room(expert):
            self._tell("admit", expert)
            self.refs[expert] = 0

    def land(self):
        """All reads land."""
        for expert in self.refs:
            self.resident.add(expert)
        for expert in self.refs:
            self._let_go(expert)

    def end_job(self, which):
        if self.jobs:
            self.land()
            for expert in self.jobs.pop(which % len(self.jobs)):
                self.refs[expert] -= 1
                self._let_go(expert)

    def observe(self, predicted):
        self._tell("observe", 0, Gate((0,), tuple(predicted)))

    def begin_step(self, step):
        while self.jobs:
            self.end_job(0)
        self._tell("begin_step", step)
