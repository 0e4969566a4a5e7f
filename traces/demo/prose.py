"""Make the demo model's prose corpus from unpacked Debian packages.

usage: python -m traces.demo.prose packages=DIR out=DIR

  packages=DIR  one folder a package, as ``dpkg -x PACKAGE.deb DIR/PACKAGE`` makes it: bible-kjv, bible-kjv-text,
                r-cran-janeaustenr, dict-devil, dict-jargon, python3.11-doc
  out=DIR       the folder of text files to make
"""

from __future__ import annotations

import gzip
import re
import shutil
import subprocess
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from policies.core.types import UserError
from traces.command import parse, run

PACKAGES = ("bible-kjv", "bible-kjv-text", "r-cran-janeaustenr", "dict-devil", "dict-jargon", "python3.11-doc")
_CHAPTER = re.compile(r"^(?=chapter )", re.IGNORECASE | re.MULTILINE)
_STRING = re.compile(rb"\x00(?:\x04\x00|\x00[\x40\x80])\x09(....)", re.DOTALL)
"""A string in R's serialisation: flags (ASCII, Latin-1 or UTF-8) and type, then its length."""


def main(argv: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    arguments = parse(argv, ("packages", "out"))
    if len(arguments) < 2:
        raise UserError("usage: python -m traces.demo.prose packages=DIR out=DIR")
    packages, out = Path(arguments["packages"]), Path(arguments["out"])
    if missing := [name for name in PACKAGES if not (packages / name).is_dir()]:
        raise UserError(f"{packages} has no folder {missing[0]}; unpack it there with dpkg -x")
    written = 0
    for source in (bible, austen, dictionaries, documentation):
        for name, text in source(packages):
            path = out / source.__name__ / f"{name}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            written += 1
    print(f"wrote {written} files to {out}")
    return 0


def bible(packages: Path) -> Iterator[tuple[str, str]]:
    """The King James version, a file a book, a paragraph a chapter."""
    with tempfile.TemporaryDirectory() as folder:
        for path in (packages / "bible-kjv-text/usr/lib").iterdir():
            shutil.copy(path, folder)
        reader = [str(packages / "bible-kjv/usr/bin/bible"), "-f", "-p", folder, "gen1:1-rev22:21"]
        text = subprocess.run(reader, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True).stdout
    verses = re.findall(r"^(\d?[A-Za-z]+)(\d+):\d+ (.*)$", text, re.MULTILINE)
    for book, in_book in groupby(verses, lambda verse: verse[0]):
        chapters = (" ".join(words for *_, words in chapter) for _, chapter in groupby(in_book, lambda verse: verse[1]))
        yield book, "\n\n".join(chapters) + "\n"


def austen(packages: Path) -> Iterator[tuple[str, str]]:
    """Jane Austen's novels, a file a chapter, from R's store of data: length, zlib stream, length, ..."""
    store = (packages / "r-cran-janeaustenr/usr/lib/R/site-library/janeaustenr/data/Rdata.rdb").read_bytes()
    novel = 0
    while store:
        stream = zlib.decompressobj()
        data = stream.decompress(store[4:])
        store = stream.unused_data
        for number, chapter in enumerate(_CHAPTER.split("\n".join(_strings(data)))):
            yield f"{novel}-{number:02}", chapter.strip() + "\n"
        novel += 1


def _strings(data: bytes) -> Iterator[str]:
    at = 0
    while found := _STRING.search(data, at):
        at = found.end() + int.from_bytes(found[1], "big")
        yield data[found.end() : at].decode("utf-8", "replace")


def dictionaries(packages: Path) -> Iterator[tuple[str, str]]:
    """The Devil's Dictionary and the Jargon File, a file for every hundred entries."""
    for name in ("devil", "jargon"):
        path = packages / f"dict-{name}/usr/share/dictd/{name}.dict.dz"
        entries = re.split(r"\n(?=\S)", gzip.decompress(path.read_bytes()).decode("utf-8", "replace"))
        for number in range(0, len(entries), 100):
            yield f"{name}-{number // 100:02}", "\n".join(entries[number : number + 100]) + "\n"


def documentation(packages: Path) -> Iterator[tuple[str, str]]:
    """Python's documentation, a file a page."""
    root = packages / "python3.11-doc/usr/share/doc/python3.11/html/_sources"
    for path in sorted(root.rglob("*.rst.txt")):
        name = path.relative_to(root).as_posix().removesuffix(".rst.txt").replace("/", "-")
        yield name, path.read_text(encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(run(main, __doc__))
