"""ShareGPT's format: ``{"id", "conversations": [{"from", "value"}, ...]}``, as a JSON array, JSON lines or Parquet.

Owns the roles and irregularities of the public files and their cousins.  Every entry is a conversation of its own:
the public file cuts long ones into parts, ``<conversation>_<part>``, that may stand far apart; they are not joined.
"""

from __future__ import annotations

import hashlib
import html
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from traces.prompts import ASSISTANT, SYSTEM, USER, Conversation, Tally, clean, in_turns
from traces.records import read_records

ROLES = {
    "human": USER,
    "user": USER,
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "bing": ASSISTANT,
    "bard": ASSISTANT,
    "assistant": ASSISTANT,
    "function_call": ASSISTANT,
    "system": SYSTEM,
    "observation": USER,  # of a tool; chat templates without tools know no other place for it
    "tool": USER,
}
LISTS = ("conversations", "items", "messages")
TEXTS = ("value", "text", "markdown", "content")

_BUTTON = re.compile(r"^([\w+#.-]*)Copy code`?", re.MULTILINE)
_CODE = re.compile(r"(```.*?(?:```|\Z))", re.DOTALL)
_BREAK = re.compile(r"<br\s*/?>|</(?:p|div|li|pre|h\d)>", re.IGNORECASE)
_NAMES = "p|div|span|li|ul|ol|pre|code|strong|em|b|i|a|h\\d|table|thead|tbody|tr|td|th"
_TAG = re.compile(rf"</?(?:{_NAMES})(?:\s[^<>]*)?>", re.IGNORECASE)


def read_sharegpt(path: str | Path, tally: Tally) -> Iterator[Conversation]:
    """The usable conversations of a file or folder, in its order."""
    seen: set[bytes] = set()
    for number, record in enumerate(read_records(path, tally, (*LISTS, "id", "system"))):
        found = conversation(record, number, tally)
        if isinstance(found, str):
            tally.drop(found)
            continue
        content = hashlib.sha256(repr(found.messages).encode("utf-8", "surrogatepass")).digest()[:8]
        if content in seen:
            tally.drop("conversations that are there already")
            continue
        seen.add(content)
        tally.kept += 1
        yield found


def conversation(record: Any, number: int, tally: Tally) -> Conversation | str:
    """What one entry holds, or why it is of no use."""
    if not isinstance(record, Mapping):
        return "entries that are no object"
    turns = next((record[key] for key in LISTS if isinstance(record.get(key), list)), None)
    if not turns:
        return "entries without messages"
    messages = [_message(turn) for turn in turns]
    for message in messages:
        if isinstance(message, str):
            return message
    said = [message for message in messages if not isinstance(message, str)]
    if isinstance(record.get("system"), str):
        said.insert(0, (SYSTEM, clean(record["system"])))
    found = in_turns(said, tally)
    if not found:
        return "conversations without a question and an answer"
    label = record.get("id")
    label = str(label) if isinstance(label, (str, int)) else f"#{number}"
    return Conversation(label, found)


def _message(turn: Any) -> tuple[str, str] | str:
    """Role and text of a message, or what is wrong with it."""
    if not isinstance(turn, Mapping):
        return "conversations with a message that is no object"
    name = turn.get("from", turn.get("role"))
    role = ROLES.get(name.lower()) if isinstance(name, str) else None
    text = next((turn[key] for key in TEXTS if isinstance(turn.get(key), str)), None)
    if role is None:
        return "conversations with an unknown role"
    if text is None:
        return "conversations with a message without text"
    return role, _plain(clean(text))


def _plain(text: str) -> str:
    """Without what the web page left in it: tags outside code, and the caption of its copy button."""
    text = _BUTTON.sub(r"\1", text)
    if "<" not in text and "&" not in text:
        return text
    pieces = _CODE.split(text)
    for i in range(0, len(pieces), 2):
        if _TAG.search(pieces[i]):
            pieces[i] = html.unescape(_TAG.sub("", _BREAK.sub("\n", pieces[i])))
    return "".join(pieces)
