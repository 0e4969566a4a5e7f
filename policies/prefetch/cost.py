"""What a prediction costs where it is made, so that a run can be charged for it.

Owns the quantities that a predictor declares.  Knows no device: how long they take is the world's business.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cost:
    """The work of one prediction, at one layer.

    ``kernels``: steps of the computation that wait for one another, whatever their size.  ``operations_per_token``:
    multiply-adds for each token.  ``bytes_per_batch``: weights or tables that are read once for all tokens that reach
    the layer together.  ``bytes_per_token``: what every token reads for itself.  ``memory_bytes``: what the predictor
    keeps in memory, which the expert cache cannot have.
    """

    kernels: int = 0
    operations_per_token: float = 0.0
    bytes_per_batch: float = 0.0
    bytes_per_token: float = 0.0
    memory_bytes: float = 0.0


FREE = Cost()


def cost_of(predictor: object) -> Cost:
    """The attribute ``cost`` of a predictor; one without it is free."""
    cost = getattr(predictor, "cost", FREE)
    assert isinstance(cost, Cost)
    return cost
