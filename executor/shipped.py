"""``pack=demo``: the pack of the small model that comes along, made when it is first asked for.

Owns where it lies.  Its name holds the weights' hash: another demo model is another pack.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from executor.checkpoint import open_folder
from executor.pack_writer import write_pack
from traces.demo import MODEL

NAME = "demo"


def with_shipped_pack(arguments: Sequence[str]) -> list[str]:
    """``arguments`` with the path of the demo model's pack in place of ``pack=demo``; a folder ``demo`` comes first."""
    if f"pack={NAME}" not in arguments or Path(NAME).exists():
        return list(arguments)
    runs = next((word.removeprefix("runs=") for word in arguments if word.startswith("runs=")), "runs")
    pack = shipped_pack(Path(runs))
    return [f"pack={pack}" if word == f"pack={NAME}" else word for word in arguments]


def shipped_pack(runs: Path) -> Path:
    """The demo model as a bf16 pack below ``runs``."""
    digest = hashlib.sha256()
    for file in sorted(MODEL.glob("*.safetensors")):
        digest.update(file.read_bytes())
    pack = runs / "packs" / f"{NAME}_model_{digest.hexdigest()[:8]}"
    if not pack.exists():
        source = open_folder(MODEL)
        try:
            source.name = NAME
            write_pack(source, pack, "bf16")
        finally:
            source.close()
    return pack
