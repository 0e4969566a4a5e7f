"""Prompts for live decoding: from a file, as text or as token ids, or random ones for a random model.

Owns the file's form and the tokenizer of a pack.  Knows no decoder.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from executor.store import ExpertStore
from policies.core.types import UserError


@dataclass(frozen=True, slots=True)
class Prompts:
    """Token ids of each prompt; ``tokenizer`` turns tokens back into text, or is None."""

    tokens: tuple[tuple[int, ...], ...]
    tokenizer: Any
    source: str

    def text(self, tokens: Sequence[int]) -> str | None:
        """What the tokens say; None without a tokenizer."""
        return None if self.tokenizer is None else str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))


def load_prompts(store: ExpertStore, path: str | None, count: int, length: int, seed: int) -> Prompts:
    """Prompts from ``path``, one a line: a JSON list of token ids, or text for the pack's tokenizer.

    Without a path: ``count`` random ones of ``length`` tokens, and only for random weights, because a real model
    chooses other experts on noise than on text.

    Raises:
        UserError: no prompts, or text without a tokenizer, or noise for a real model.
    """
    if path is None:
        if not store.manifest.random:
            raise UserError(
                f"{store.path} holds a real model, which routes noise otherwise than text; give prompts=FILE"
            )
        vocabulary = int(store.manifest.config["vocab_size"])
        drawn = np.random.default_rng(seed).integers(0, vocabulary, (count, length))
        return Prompts(tuple(tuple(row) for row in drawn.tolist()), None, "random tokens")
    try:
        lines = [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"prompts={path} cannot be read ({error}); give a text file with a prompt a line") from error
    if not lines:
        raise UserError(f"prompts={path} is empty; give a text file with a prompt a line")
    given = [_ids(line) for line in lines]
    tokenizer: Any = _tokenizer(store) if any(ids is None for ids in given) else None
    tokens = [ids if ids is not None else tokenizer(line)["input_ids"] for ids, line in zip(given, lines, strict=True)]
    return Prompts(tuple(tuple(ids) for ids in tokens), tokenizer, path)


def _ids(line: str) -> list[int] | None:
    try:
        ids = json.loads(line)
    except ValueError:
        return None
    whole = isinstance(ids, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
    return ids if whole and ids else None


def _tokenizer(store: ExpertStore) -> Any:
    from transformers import AutoTokenizer  # noqa: PLC0415

    try:
        return AutoTokenizer.from_pretrained(store.path, local_files_only=True)
    except Exception as error:  # the library has many ways to say that there is none
        raise UserError(
            f"{store.path} has no usable tokenizer; give prompts as JSON lists of token ids, one a line"
        ) from error


def stop_tokens(store: ExpertStore) -> tuple[int, ...]:
    """The config's end-of-sequence tokens; none for random weights, which never mean to stop."""
    if store.manifest.random:
        return ()
    stop = store.manifest.config.get("eos_token_id")
    return tuple(stop) if isinstance(stop, list) else () if stop is None else (int(stop),)
