"""Retention by expected use: the expert that the live requests are expected to need last leaves first.

Owns each live request's recent experts and the popularity of all.  Knows the layer that each request has reached,
because it is told every gate.
"""

from __future__ import annotations

from collections.abc import Container

import numpy as np

from policies.core.messages import Gate
from policies.core.protocols import EvictionPolicy
from policies.core.types import ExpertId, RequestId, UserError

_SURE = 0.98
"""The most that a chance is taken for."""


class ExpectedUse(EvictionPolicy):
    """Evicts the expert with the latest expected next use, counted in steps.

    The chance that a request uses an expert at its next visit of the layer is

        recent * r + (1 - recent) * (n + prior * popularity) / (w + prior)

    ``r``: its uses by the request, each worth half of the one a step later; ``n`` uses in ``w`` steps, with a
    half-life of ``half_life_steps``; ``popularity``: the share of all requests' gates that chose it, which stands for
    ``prior`` steps.  With the chance p that some live request uses it in a step, and the chance q that one of those
    that have yet to reach the layer in this step does, the next use of an expert of layer l of L is expected
    l / L + (1 - q) / p steps after the step's beginning: at once if a lagging request wants it, else a step for each
    trial that fails.  A request that is absent from a whole step is forgotten.
    """

    def __init__(
        self,
        n_layers: int,
        n_experts: int,
        recent: float = 0.2,
        half_life_steps: float = 24.0,
        prior_steps: float = 8.0,
    ) -> None:
        if not 0 <= recent <= 1 or half_life_steps <= 0 or prior_steps < 0:
            raise UserError(
                f"ExpectedUse: recent {recent}, half_life_steps {half_life_steps}, prior_steps {prior_steps}; expected "
                f"a share, a number above 0 and a number from 0"
            )
        self._n_layers, self._n_experts = n_layers, n_experts
        self._recent, self._keep, self._prior = recent, 0.5 ** (1 / half_life_steps), prior_steps
        self._popularity = np.zeros((n_layers, n_experts))
        self._gates = [0] * n_layers
        self._due_at = np.zeros((n_layers, n_experts))
        self._evictable = np.full(n_layers * n_experts, -np.inf)  # expected next use of those that may leave
        self._rows: dict[RequestId, int] = {}  # live requests
        self._seen: dict[RequestId, None] = {}  # of them, in this step
        self._r = np.zeros((0, n_layers, n_experts))
        self._n = np.zeros((0, n_layers, n_experts))
        self._w = np.zeros((0, n_layers))
        self._spared = np.ones((n_layers, 0, n_experts))  # chance that a request does not use an expert
        self._to_come = np.zeros((n_layers, 0), dtype=bool)  # requests that have yet to reach a layer in this step
        self._step = 0

    def begin_step(self, step: int) -> None:
        """All layers are ahead of the requests that took part in the last step; others are forgotten."""
        self._step += 1
        for request in [request for request in self._rows if request not in self._seen]:
            row = self._rows.pop(request)
            self._r[row], self._n[row], self._w[row], self._spared[:, row] = 0.0, 0.0, 0.0, 1.0
        self._seen.clear()
        self._to_come[:] = False
        self._to_come[:, list(self._rows.values())] = True

    def observe(self, request: RequestId, gate: Gate) -> None:
        """Reckon the layer of the gate anew."""
        layer = gate.experts[0] // self._n_experts
        low = layer * self._n_experts
        chosen = [expert - low for expert in gate.experts]
        row = self._row(request)
        popularity, spared = self._popularity[layer], self._spared[layer]
        r, n = self._r[row, layer], self._n[row, layer]
        popularity[chosen] += 1.0
        self._gates[layer] += 1
        r *= 0.5
        r[chosen] += 0.5
        n *= self._keep
        n[chosen] += 1.0
        w = self._w[row, layer] = self._w[row, layer] * self._keep + 1.0
        known = n + popularity * (self._prior / self._gates[layer])
        spared[row] = 1.0 - np.minimum(self._recent * r + (1.0 - self._recent) / (w + self._prior) * known, _SURE)
        self._to_come[layer, row] = False
        used = 1.0 - np.multiply.reduce(spared, axis=0)
        not_now = np.multiply.reduce(spared[self._to_come[layer]], axis=0)
        due = self._due_at[layer] = self._step + layer / self._n_layers + not_now / np.maximum(used, 1e-9)
        shown = self._evictable[low : low + self._n_experts]
        np.copyto(shown, due, where=shown > -np.inf)

    def touch(self, expert: ExpertId, uses: int) -> None:
        """Needed: no candidate until its release."""
        self._evictable[expert] = -np.inf

    def release(self, expert: ExpertId) -> None:
        """A candidate."""
        self._evictable[expert] = self._due_at.flat[expert]

    def victim(self, evictable: Container[ExpertId], incoming: ExpertId) -> ExpertId | None:
        """The candidate that is due last; of equals the one with the lowest id."""
        expert = int(self._evictable.argmax())
        if expert in evictable:
            return expert
        order = np.argsort(-self._evictable, kind="stable").tolist()
        return next((expert for expert in order if expert in evictable), None)

    def forget(self, expert: ExpertId) -> None:
        """No candidate any more."""
        self._evictable[expert] = -np.inf

    def _row(self, request: RequestId) -> int:
        """The request's place in the tables; a new one if all are taken."""
        self._seen[request] = None
        row = self._rows.get(request)
        if row is None:
            taken = self._rows.values()
            row = next((row for row in range(len(self._w)) if row not in taken), len(self._w))
            if row == len(self._w):
                layers, experts = self._n_layers, self._n_experts
                self._r = np.concatenate([self._r, np.zeros((1, layers, experts))])
                self._n = np.concatenate([self._n, np.zeros((1, layers, experts))])
                self._w = np.concatenate([self._w, np.zeros((1, layers))])
                self._spared = np.concatenate([self._spared, np.ones((layers, 1, experts))], axis=1)
                self._to_come = np.concatenate([self._to_come, np.zeros((layers, 1), dtype=bool)], axis=1)
            self._rows[request] = row
        return row
