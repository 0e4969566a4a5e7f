"""Plain text as prompts: a folder of text files, one file of passages, or JSON lines with a text field."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from traces.format import TraceError
from traces.prompts import USER, Conversation, Tally, clean
from traces.records import read_records

FIELDS = ("text", "prompt", "content")
LEAST_CHARACTERS = 1000
"""A passage of a single file is at least so long: paragraphs are joined until it is."""
MOST_BYTES = 1 << 20
"""Of each file of a folder, so much is read: a prompt is its beginning."""
RECORDS = (".json", ".jsonl", ".ndjson", ".gz", ".parquet")


def read_text(path: str | Path, tally: Tally) -> Iterator[Conversation]:
    """One text for each file of a folder, passage of a file, or record with a text."""
    path = Path(path)
    for label, text in _texts(path, tally):
        if text.strip():
            tally.kept += 1
            yield Conversation(label, ((USER, clean(text)),))
        else:
            tally.drop("empty texts")


def _texts(path: Path, tally: Tally) -> Iterator[tuple[str, str]]:
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            if file.is_file():
                with file.open("rb") as data:
                    raw = data.read(MOST_BYTES)
                if b"\0" in raw:
                    tally.drop("files that are no text")
                else:
                    yield file.relative_to(path).as_posix(), raw.decode("utf-8", "replace")
    elif path.suffix in RECORDS:
        for number, record in enumerate(read_records(path, tally, FIELDS)):
            fields = record if isinstance(record, Mapping) else {}
            text = next((fields[name] for name in FIELDS if isinstance(fields.get(name), str)), None)
            if text is None:
                tally.drop("records without a text")
            else:
                yield f"#{number}", text
    else:
        yield from _passages(path)


def _passages(path: Path) -> Iterator[tuple[str, str]]:
    number, passage = 0, ""
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                passage += line
                if not line.strip() and len(passage) >= LEAST_CHARACTERS:
                    yield f"#{number}", passage
                    number, passage = number + 1, ""
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}") from None
    yield f"#{number}", passage
