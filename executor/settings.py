"""The settings of ``executor/options/executor/machine.yaml``, checked.

Owns what they may be; knows nothing of how they are carried out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from policies.core.types import UserError
from traces.format import NEXT_SCORES

RECORDABLE = ("token_id", "weights", "scores", *NEXT_SCORES)
"""Columns that ``record_trace`` can write beside the ids."""

_CHOICES = {
    "mode": ("live", "replay"),
    "link": ("raw", "paced"),
    "store": ("disk", "ram"),
    "torch_device": ("cpu", "cuda"),
    "kernels": ("torch", "triton"),
}


@dataclass(frozen=True, slots=True)
class MachineSettings:
    """How one run uses this machine; the YAML says what each means."""

    pack: str
    mode: str
    journal: str | None
    prompts: str | None
    prompt_tokens: int
    link: str
    bytes_per_s: float | None
    store: str
    readers: int
    fetch_slots: int | None
    verify_reads: bool
    allow_buffered: bool
    torch_device: str
    kernels: str
    graphs: bool
    threads: int | None
    settle: int
    temperature: float
    top_k: int
    top_p: float
    record_trace: str | None
    record_columns: tuple[str, ...] | None

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> MachineSettings:
        """Read and check them.  Raises UserError naming the first that no run can have."""
        values = {key: settings[key] for key in cls.__slots__}
        if values["pack"] is None:
            raise UserError("pack has no value; give pack=DIR, made by python -m executor.pack")
        _check_values(values)
        _check_together(values)
        return cls(**values)


def _check_values(values: Mapping[str, Any]) -> None:
    for key, choices in _CHOICES.items():
        if values[key] not in choices:
            raise UserError(f"{key}={values[key]}: expected {' or '.join(choices)}")
    for key in ("verify_reads", "allow_buffered", "graphs"):
        if not isinstance(values[key], bool):
            raise UserError(f"{key}={values[key]}: expected true or false")
    for key, least in (
        ("readers", 1),
        ("fetch_slots", 1),
        ("threads", 1),
        ("prompt_tokens", 1),
        ("settle", 0),
        ("top_k", 0),
    ):
        value = values[key]
        if value is None and key in {"threads", "fetch_slots"}:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UserError(f"{key}={value}: expected a whole number of at least {least}")
    columns = values["record_columns"]
    if columns is not None and (not isinstance(columns, list) or not set(columns) <= set(RECORDABLE)):
        raise UserError(f"record_columns={columns}: expected a list of some of {', '.join(RECORDABLE)}")
    for key in ("temperature", "top_p"):
        if not _number(values[key]) or values[key] < 0:
            raise UserError(f"{key}={values[key]}: expected a number of at least 0")


def _check_together(values: Mapping[str, Any]) -> None:
    rate = values["bytes_per_s"]
    if values["link"] == "paced" and not (_number(rate) and rate > 0):
        raise UserError(f"bytes_per_s={rate}: link=paced needs a rate above 0, such as bytes_per_s=1e9")
    if values["link"] == "raw" and rate is not None:
        raise UserError(f"bytes_per_s={rate} is for link=paced; add that, or leave it out")
    if values["kernels"] == "triton" and values["torch_device"] != "cuda":
        raise UserError(f"kernels=triton needs torch_device=cuda, not {values['torch_device']}; set kernels=torch")
    if values["kernels"] != "triton" and not values["graphs"]:
        raise UserError("graphs=false is for kernels=triton; add that, or leave it out")
    if values["journal"] is not None and values["mode"] != "replay":
        raise UserError("journal= is for mode=replay; leave one of the two out")
    if values["prompts"] is not None and values["mode"] != "live":
        raise UserError("prompts= is for mode=live; add that, or leave them out")
    if values["record_trace"] is not None and values["mode"] != "live":
        raise UserError(
            "record_trace= is for mode=live: in a replay the routing is given; add mode=live, or leave it out"
        )
    if values["record_columns"] is not None and values["record_trace"] is None:
        raise UserError("record_columns= is for record_trace=FILE; add that, or leave it out")


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
