"""SWE-agent trajectories: the public data set's rows, ``.traj`` files, and OpenHands' variant.

Owns how each of them writes down who said what.  A conversation is one trajectory; its label begins with the number of
the row, because the same issue is tried many times.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from traces.prompts import ASSISTANT, SYSTEM, USER, Conversation, Tally, clean, in_turns
from traces.records import read_records

ROLES = {"system": SYSTEM, "user": USER, "ai": ASSISTANT, "assistant": ASSISTANT, "tool": USER}
COLUMNS = ("instance_id", "trajectory", "history")


def read_swe_agent(path: str | Path, tally: Tally) -> Iterator[Conversation]:
    """The usable trajectories of a file or folder, in its order."""
    for number, record in enumerate(read_records(path, tally, COLUMNS)):
        found = trajectory(record, number, tally)
        if isinstance(found, str):
            tally.drop(found)
        else:
            tally.kept += 1
            yield found


def trajectory(record: Any, number: int, tally: Tally) -> Conversation | str:
    """What one row or file holds, or why it is of no use."""
    if not isinstance(record, Mapping):
        return "rows that are no object"
    history, steps = record.get("history"), record.get("trajectory")
    messages: list[tuple[str, str]] = []
    if isinstance(history, list) and history:
        said = history
    elif isinstance(steps, list) and steps:
        said = steps
    else:
        return "rows without a trajectory"
    for item in said:
        if not isinstance(item, Mapping):
            return "trajectories with an item that is no object"
        if "role" not in item and {"action", "observation", "response"} & set(item):
            messages += _step(item)
            continue
        role = ROLES.get(str(item.get("role")).lower())
        if role is None:
            return "trajectories with an unknown role"
        messages.append((role, clean(_said(item))))
    if messages and messages[0][0] == ASSISTANT and steps is said and "role" not in said[0]:
        messages.insert(0, (USER, clean(_task(record))))
    found = in_turns(messages, tally)
    if not found:
        return "trajectories without a task and an answer"
    name = record.get("instance_id") or record.get("environment") or ""
    return Conversation(f"{number}:{name}", found)


def _said(item: Mapping[str, Any]) -> str:
    """Text of one message: a string, a list of parts, or null with the system prompt or tool calls beside it."""
    parts = [_text(item[key]) for key in ("text", "content") if item.get(key)]
    if not parts and isinstance(item.get("system_prompt"), str):
        parts = [item["system_prompt"]]
    for call in item.get("tool_calls") or ():
        function = call.get("function", call) if isinstance(call, Mapping) else {}
        arguments = function.get("arguments", "")
        parts.append(f"{function.get('name', '')} {arguments if isinstance(arguments, str) else json.dumps(arguments)}")
    return "\n".join(part for part in parts if part)


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(str(part.get("text") or "") if isinstance(part, Mapping) else str(part) for part in content)
    return content if isinstance(content, str) else ""


def _step(item: Mapping[str, Any]) -> list[tuple[str, str]]:
    """One step of a ``.traj`` file without history: what the model said and what came of it."""
    said = item.get("response") or "\n".join(str(item.get(key) or "") for key in ("thought", "action"))
    return [(ASSISTANT, clean(_text(said))), (USER, clean(_text(item.get("observation"))))]


def _task(record: Mapping[str, Any]) -> str:
    return str(record.get("environment") or record.get("instance_id") or "Solve the task.")
