"""A pack's contents as the decoder wants them: shared weights in a model, slots as matrices.

Owns nothing that changes.  Knows neither requests nor what lies in which slot.
"""

from __future__ import annotations

import torch
from safetensors.torch import load_file

from executor.experts import ExpertWeights
from executor.families import build_shared
from executor.model import Decoder
from executor.quant import dequantise_views
from executor.skeleton import text_config
from executor.slots import SlotArena
from executor.store import SHARED_DTYPES, ExpertStore


def open_decoder(
    store: ExpertStore, max_requests: int, max_tokens: int, device: torch.device | str = "cpu", predict: int = 0
) -> Decoder:
    """A decoder over a pack's shared weights, in their own dtype.

    Raises PackError or UserError in seconds if the model is of no known family.
    """
    device = torch.device(device)
    dtype = getattr(torch, SHARED_DTYPES[store.manifest.shared_dtype])
    config = text_config(store.manifest.config)
    shared = load_file(store.shared_path, device=str(device))
    return Decoder(build_shared(config, shared, dtype, device), max_requests, max_tokens, predict=predict)


class SlotWeights:
    """The slots of an arena as matrices in ``dtype``: views where they are stored so, else converted at each use."""

    def __init__(self, arena: SlotArena, dtype: torch.dtype) -> None:
        self._arena, self._dtype = arena, dtype

    def weights(self, slot: int) -> ExpertWeights:
        """The expert that lies in ``slot``."""
        return ExpertWeights(*dequantise_views(self._arena.views[slot], self._dtype))
