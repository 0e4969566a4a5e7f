"""The nouns that every module shares: expert ids, the model's routing shape, phases, errors.

Owns no state.  Knows nothing of time, bytes, tensors or files.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

ExpertId = int
"""``layer * n_experts + index``: one integer names an expert of the whole model."""

RequestId = int


class Phase(IntEnum):
    """What a compute batch runs (paper §4.1)."""

    ENTRY = 0  # attention and gate of layer 0, all requests of the step together
    JOB = 1  # MoE of layer l, then attention and gate of layer l + 1
    HEAD = 2  # the LM head, all requests of the step together


class FetchKind(IntEnum):
    """Why an expert is fetched."""

    DEMAND = 0  # a job needs it
    PREFETCH = 1  # a prediction asked for it


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The routing shape of a model: all that decisions depend on.

    ``n_layers`` counts MoE layers only; a dense first layer has no experts and no index here.
    """

    name: str
    n_layers: int
    n_experts: int
    top_k: int

    def __post_init__(self) -> None:
        for field in ("n_layers", "n_experts", "top_k"):
            value = getattr(self, field)
            if value < 1:
                raise UserError(f"model {self.name}: {field} is {value}, expected at least 1")
        if self.top_k > self.n_experts:
            raise UserError(
                f"model {self.name}: top_k {self.top_k} is above its {self.n_experts} experts a layer; "
                f"lower model.top_k"
            )

    @property
    def n_total(self) -> int:
        """Experts of the whole model: the cache entries of a 100% cache."""
        return self.n_layers * self.n_experts

    def expert(self, layer: int, index: int) -> ExpertId:
        """The id of expert ``index`` of MoE layer ``layer``."""
        return layer * self.n_experts + index

    def split(self, expert: ExpertId) -> tuple[int, int]:
        """``(layer, index)`` of an expert id."""
        return divmod(expert, self.n_experts)


class UserError(Exception):
    """Bad input: the message is one line that says what was wrong, what was expected and what to change.

    Commands print it and exit with code 2.
    """


class CapacityError(UserError):
    """The expert cache is too small for what was asked of it."""


class ProtocolError(Exception):
    """A backend reported something that the core did not ask for, or reported it twice."""


class DeadlockError(Exception):
    """Nothing is running and something is unfinished; the message holds a dump of the state."""
