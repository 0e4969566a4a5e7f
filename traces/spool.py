"""Captured rows on their way to a trace: raw files that grow request by request, so that memory does not.

A request is finished once its facts are written; what is not finished is captured again.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from policies.core.types import ModelSpec, UserError
from traces.format import COLUMN_DTYPES, Array, RequestTrace
from traces.storage import TraceWriter

PLAN = "plan.json"
ROWS_AT_ONCE = 256


class Spool:
    """The folder beside a trace that is being captured.

    ``plan``: all that decides what is captured; a folder of another plan is refused.
    """

    def __init__(self, folder: Path, plan: Mapping[str, Any]) -> None:
        self._folder = folder
        text = json.dumps(plan, sort_keys=True, indent=1)
        stored = folder / PLAN
        if stored.exists() and stored.read_text(encoding="utf-8") != text:
            raise UserError(
                f"{folder} holds an unfinished capture with other settings; remove it, or repeat its command"
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not stored.exists():
                stored.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {folder}: {error.strerror}; choose another out=") from None

    def finished(self, request: int) -> bool:
        """Whether all rows of a request are here."""
        return self._facts(request).exists()

    def begin(self, request: int) -> None:
        """Forget the rows of an attempt that was broken off."""
        for path in self._folder.glob(f"{request:06}.*"):
            path.unlink()

    def append(self, request: int, rows: Mapping[str, Array]) -> None:
        """More rows of a request: ``experts`` and optional columns."""
        for name, values in rows.items():
            with self._column(request, name).open("ab") as file:
                file.write(np.ascontiguousarray(values).tobytes())

    def finish(self, request: int, facts: Mapping[str, Any]) -> None:
        """No more rows; ``facts``: tokens, prompt_tokens, arrival_s, label, shapes of the columns."""
        path = self._facts(request)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(facts), encoding="utf-8")
        os.replace(partial, path)

    def write(self, out: Path, model: ModelSpec, requests: int, **header: Any) -> int:
        """Make the trace of all requests, some rows at a time; returns the number of tokens."""
        tokens = 0
        first = json.loads(self._facts(0).read_text(encoding="utf-8"))["shapes"]
        columns = [name for name in first if name != "experts"]
        hidden = first["hidden"][-1] if "hidden" in first else 0
        with TraceWriter(out, model, columns=columns, hidden_size=hidden, **header) as writer:
            for request in range(requests):
                facts = json.loads(self._facts(request).read_text(encoding="utf-8"))
                files = {}
                for name, shape in facts["shapes"].items():
                    kind, rows = COLUMN_DTYPES.get(name, "uint16"), (facts["tokens"], *shape)
                    files[name] = np.memmap(self._column(request, name), kind, "r", shape=rows)
                for start in range(0, facts["tokens"], ROWS_AT_ONCE):
                    part = {name: np.array(values[start : start + ROWS_AT_ONCE]) for name, values in files.items()}
                    experts = part.pop("experts")
                    writer.write(
                        RequestTrace(request, experts, part, facts["prompt_tokens"], facts["arrival_s"], facts["label"])
                    )
                tokens += facts["tokens"]
        return tokens

    def remove(self) -> None:
        """The trace is there; the rows are not needed any more."""
        shutil.rmtree(self._folder)

    def _facts(self, request: int) -> Path:
        return self._folder / f"{request:06}.json"

    def _column(self, request: int, name: str) -> Path:
        return self._folder / f"{request:06}.{name}.bin"
