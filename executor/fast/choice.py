"""Whether a run takes the fast path, from its settings: refused, declined for this system, or opened.

Owns the conditions.  What a machine or model cannot do is refused; what only some systems of a comparison need, and the
fast path does not show, is declined with a reason, and that system runs on ``executor.backend`` instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from executor.fast.decoder import FastDecoder, check_sizes
from executor.fast.families import check_family
from executor.fast.ops import triton_ops
from executor.live_predictor import LivePredictor
from executor.model import Decoder
from executor.rows import tile_rows
from executor.settings import MachineSettings
from executor.slots import SlotArena
from executor.store import ExpertStore

CUDA = "cuda"


def check_choice(settings: Mapping[str, Any], machine: MachineSettings, store: ExpertStore) -> None:
    """Raise UserError if ``kernels=triton`` was asked for and cannot be had for this pack or here."""
    if machine.kernels == "triton":
        check_family(store.manifest.family)
        check_sizes(store.spec, int(settings["concurrency"]), tile_rows(CUDA))
        triton_ops()


def why_declined(machine: MachineSettings, predictor: LivePredictor | None) -> str | None:
    """Why a system of a ``kernels=triton`` run goes without them; None if it does not."""
    if predictor is not None and predictor.reads_scores:
        return "its predictor reads all scores of the gates"
    if machine.record_trace is not None:
        return "its routing is recorded"
    return None


def open_fast(
    settings: Mapping[str, Any], machine: MachineSettings, decoder: Decoder, arena: SlotArena, store: ExpertStore
) -> FastDecoder:
    """The fast path over a decoder and the slots of its cache, with as many job slots as the core commits batches."""
    job_slots = int(settings["schedule"].get("compute_slots", 1))
    fast = FastDecoder(decoder, arena.arena, store.geometry, triton_ops(), job_slots=job_slots, graphs=machine.graphs)
    fast.check_rows()
    return fast
