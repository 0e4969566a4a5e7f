"""Text for the demo model: a folder of files for each domain, split into training and held-out files.

Owns the split and the byte stream.  A document's bytes are its tokens 0 to 255; token 256 ends it.

usage: python -m traces.demo.corpus folder=DIR out=DIR [every=N]

Copies the held-out files of a domain (or every Nth of them) into one folder, as prompts for a capture.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from policies.core.types import UserError
from traces.command import parse, run, whole_number

END = 256
"""The token between documents."""
HELD_OUT = 20
"""One file in so many is held out, told by the hash of its name: no seed, no order."""
LEFT_OUT = ("site-packages", "encodings", "pydoc_data", "__pycache__")
"""Folders of the standard library's tree that are not its sources, or are tables."""
SUFFIXES = (".py", ".txt")

Tokens = NDArray[np.int16]


@dataclass(frozen=True, slots=True, eq=False)
class Domain:
    """One kind of text: a training stream and held-out documents, each closed by ``END``."""

    name: str
    train: Tokens
    held_out: Tokens
    files: int
    held_out_files: int

    @property
    def held_out_bytes(self) -> int:
        """Bytes of the held-out text, without its ``END`` tokens."""
        return len(self.held_out) - self.held_out_files


def main(argv: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    arguments = parse(argv, ("folder", "out", "every"))
    if missing := [key for key in ("folder", "out") if key not in arguments]:
        raise UserError(f"{missing[0]}= is missing; usage: python -m traces.demo.corpus folder=DIR out=DIR")
    root, out = Path(arguments["folder"]), Path(arguments["out"])
    names = sorted(path.relative_to(root).as_posix() for path in _files(root))
    chosen = sorted(name.replace("/", "-") for name in names if is_held_out(name))
    chosen = chosen[:: whole_number(arguments, "every") or 1]
    out.mkdir(parents=True, exist_ok=True)
    for name in names:
        if is_held_out(name) and name.replace("/", "-") in chosen:
            shutil.copy(root / name, out / name.replace("/", "-"))
    print(f"copied {len(chosen)} held-out files to {out}")
    return 0


def read_domain(name: str, folder: str | Path) -> Domain:
    """All text files below ``folder``, in the order of their names.

    Raises UserError if there is nothing to train on or nothing to hold out.
    """
    root = Path(folder)
    train: list[Tokens] = []
    held_out: list[Tokens] = []
    for path in _files(root):
        data = np.frombuffer(path.read_bytes(), np.uint8).astype(np.int16)
        relative = path.relative_to(root).as_posix()
        part = held_out if is_held_out(relative) else train
        part.append(np.append(data, np.int16(END)))
    if not train or not held_out:
        raise UserError(
            f"{root} gives {len(train)} training and {len(held_out)} held-out files for {name}; expected at least one "
            f"of each, so give a folder with some dozens of {' or '.join(SUFFIXES)} files"
        )
    return Domain(name, np.concatenate(train), np.concatenate(held_out), len(train), len(held_out))


def is_held_out(relative: str) -> bool:
    """Whether a file, by its path below the domain's folder, is never trained on."""
    return hashlib.sha256(relative.encode()).digest()[0] % HELD_OUT == 0


def _files(root: Path) -> Iterator[Path]:
    for path in sorted(root.rglob("*")):
        if path.suffix in SUFFIXES and path.is_file() and not {*path.relative_to(root).parts} & {*LEFT_OUT}:
            yield path


if __name__ == "__main__":
    raise SystemExit(run(main, __doc__))
