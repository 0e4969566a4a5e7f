"""Missing experts of each request at each layer (Figure 5), from a journal.

An expert is missing for a request if the step had to fetch it and the request's gate selected it.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from analysis.account import JournalRecord
from policies.core.messages import Compute, ComputeDone, Fetch, StepBegin
from policies.core.types import ExpertId, ModelSpec, Phase, RequestId


def missing(records: Iterable[JournalRecord], model: ModelSpec, warmup: int) -> npt.NDArray[np.int64]:
    """Counts [steps, requests, layers] of the measured steps; the requests in the order of ``StepBegin``.

    Steps with another number of requests than the first measured one are left out.
    """
    steps: list[npt.NDArray[np.int64]] = []
    requests: tuple[RequestId, ...] = ()
    selected: dict[tuple[RequestId, int], tuple[ExpertId, ...]] = {}
    fetched: set[ExpertId] = set()
    batches: dict[int, Compute] = {}
    step = -1
    for record in records:
        for event in record.events:
            if isinstance(event, StepBegin):
                if step >= warmup:
                    steps.append(_count(requests, selected, fetched, model))
                step, requests = event.step, event.requests
                selected.clear()
                fetched.clear()
            elif isinstance(event, ComputeDone):
                batch = batches.pop(event.batch)
                layer = 0 if batch.phase is Phase.ENTRY else batch.layer + 1
                for request, gate in zip(batch.requests, event.gates, strict=False):
                    selected[request, layer] = gate.experts
        for command in record.commands:
            if isinstance(command, Compute):
                batches[command.batch] = command
            elif isinstance(command, Fetch):
                fetched.add(command.expert)
    if step >= warmup:
        steps.append(_count(requests, selected, fetched, model))
    whole = [counts for counts in steps if counts.shape == steps[0].shape]
    return np.array(whole)


def extra_by_rank(counts: npt.NDArray[np.int64], first_layers: int) -> npt.NDArray[np.float64]:
    """Accumulated misses over the requests' mean in the later layers [ranks, layers - first_layers].

    In each step the requests are ranked by their misses in the first layers, most first (ties: in their order); the
    extra misses of a rank are averaged over the steps.
    """
    early = counts[:, :, :first_layers].sum(axis=2)
    order = np.argsort(-early, axis=1, kind="stable")
    later = np.take_along_axis(counts[:, :, first_layers:], order[:, :, None], axis=1).astype(np.float64)
    extra = later - later.mean(axis=1, keepdims=True)
    result: npt.NDArray[np.float64] = extra.cumsum(axis=2).mean(axis=0)
    return result


def _count(
    requests: tuple[RequestId, ...],
    selected: dict[tuple[RequestId, int], tuple[ExpertId, ...]],
    fetched: set[ExpertId],
    model: ModelSpec,
) -> npt.NDArray[np.int64]:
    layers = range(model.n_layers)
    return np.array(
        [[sum(e in fetched for e in selected.get((request, layer), ())) for layer in layers] for request in requests],
        dtype=np.int64,
    )
