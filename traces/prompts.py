"""Prompts for capture: conversations of a data set, which of them are taken, and what was dropped for which reason.

Knows no data set's format and no model; a tokenizer is handed in as a function.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from policies.core.types import UserError

SYSTEM, USER, ASSISTANT = "system", "user", "assistant"

Message = dict[str, str]
"""``{"role": ..., "content": ...}``, as chat templates want it."""


Read = Callable[["Tally"], Iterator["Conversation"]]
"""Reads a data set from its beginning."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in order: perhaps a system message, then user and assistant in turn, ending on an answer.

    A plain text is one user message without an answer.
    """

    label: str
    messages: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """``encode``: text -> token ids; ``render``: messages -> the text that asks for the next answer."""

    encode: Callable[[str], list[int]]
    render: Callable[[Sequence[Message]], str]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request to capture.  ``answer_tokens``: length of the recorded answer, 0 if there is none."""

    label: str
    tokens: tuple[int, ...]
    answer_tokens: int = 0
    arrival_s: float | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """Which prompts are taken, in tokens.  The defaults are those of the usual ShareGPT benchmark.

    ``cut``: of a prompt that is too long, take its end.
    """

    least_prompt: int = 4
    least_answer: int = 4
    most_prompt: int = 1024
    cut: bool = False


@dataclass(slots=True)
class Tally:
    """How many records were kept, dropped and changed, and why."""

    kept: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    changed: dict[str, int] = field(default_factory=dict)

    def drop(self, reason: str) -> None:
        """One record less."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    def change(self, what: str, count: int = 1) -> None:
        """Something was repaired."""
        if count:
            self.changed[what] = self.changed.get(what, 0) + count

    def summary(self) -> list[str]:
        """Lines for the user."""
        dropped = sum(self.dropped.values())
        lines = [f"kept     {self.kept} of {self.kept + dropped} conversations"]
        lines += [f"dropped  {count} {reason}" for reason, count in sorted(self.dropped.items())]
        lines += [f"changed  {count} {what}" for what, count in sorted(self.changed.items())]
        return lines

    def as_json(self) -> dict[str, Any]:
        """For a trace's notes."""
        return {"kept": self.kept, "dropped": dict(sorted(self.dropped.items()))}


def select(
    read: Read, requests: int, seed: int, tokenizer: Tokenizer, *, limits: Limits, repeat: bool = False
) -> tuple[list[Prompt], Tally, Tally]:
    """``requests`` prompts drawn by ``seed``; what the reader dropped, and what did not fit the limits.

    Every conversation draws a number and the smallest win, so the first prompts of a larger selection are those of a
    smaller one.  Only a few times ``requests`` conversations are in memory; where too many of them do not fit, the data
    set is read again with a larger reserve.  Raises UserError if there are too few, unless ``repeat``.
    """
    reserve = 4 * requests + 64
    while True:
        tally, fitted = Tally(), Tally()
        drawn = draw(read(tally), reserve, seed)
        prompts: list[Prompt] = []
        for conversation in drawn:
            found = fit(conversation, tokenizer, limits)
            if isinstance(found, str):
                fitted.drop(found)
            else:
                prompts.append(found)
                if len(prompts) == requests:
                    break
        fitted.kept = len(prompts)
        if len(prompts) == requests or len(drawn) < reserve:
            break
        reserve *= 8
    if len(prompts) < requests:
        if not (repeat and prompts):
            why = "; ".join(f"{count} {reason}" for reason, count in sorted((tally.dropped | fitted.dropped).items()))
            raise UserError(
                f"the data set has {len(prompts)} fitting prompts, not {requests} (dropped: {why or 'none'}); "
                f"lower requests or add {'cut=true' if 'prompts too long' in fitted.dropped else 'repeat=true'}"
            )
        prompts = [prompts[i % len(prompts)] for i in range(requests)]
    return prompts, tally, fitted


def draw(conversations: Iterable[Conversation], count: int, seed: int) -> list[Conversation]:
    """At most ``count`` conversations, drawn and shuffled by ``seed`` in one pass."""
    rng = np.random.default_rng(seed)
    heap: list[tuple[float, int, Conversation]] = []
    for number, conversation in enumerate(conversations):
        entry = (-float(rng.random()), -number, conversation)
        if len(heap) < count:
            heapq.heappush(heap, entry)
        elif entry > heap[0]:
            heapq.heapreplace(heap, entry)
    return [conversation for *_, conversation in sorted(heap, key=lambda entry: entry[:2], reverse=True)]


def fit(conversation: Conversation, tokenizer: Tokenizer, limits: Limits) -> Prompt | str:
    """The prompt before the last answer whose history fits, or why there is none.

    A plain text has no answer and is cut to the largest prompt.
    """
    messages = [{"role": role, "content": text} for role, text in conversation.messages]
    if all(role == USER for role, _ in conversation.messages):
        tokens = tokenizer.encode(messages[0]["content"][: 16 * limits.most_prompt])[: limits.most_prompt]
        return Prompt(conversation.label, tuple(tokens)) if len(tokens) >= limits.least_prompt else "prompts too short"
    answers = [i for i, (role, _) in enumerate(conversation.messages) if role == ASSISTANT]
    reason = "conversations without an answer"
    for at in reversed(answers):
        # A token is seldom longer than this: what is far too long is not worth tokenizing.
        if not limits.cut and sum(len(m["content"]) for m in messages[:at]) > 16 * limits.most_prompt:
            reason = "prompts too long"
            continue
        tokens = tokenizer.encode(tokenizer.render(messages[:at]))
        tokens = tokens[-limits.most_prompt :] if limits.cut else tokens
        answer = tokenizer.encode(messages[at]["content"])
        if len(tokens) > limits.most_prompt:
            reason = "prompts too long"
        elif len(tokens) < limits.least_prompt:
            reason = "prompts too short"
        elif len(answer) < limits.least_answer:
            reason = "answers too short"
        else:
            return Prompt(conversation.label, tuple(tokens), len(answer))
    return reason


def clean(text: str) -> str:
    """Line ends as ``\\n``, and unpaired surrogates, which no tokenizer takes, as U+FFFD."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def in_turns(messages: Iterable[tuple[str, str]], tally: Tally) -> tuple[tuple[str, str], ...]:
    """What a chat template takes: one system message at most, user first, roles in turn, ending on an answer.

    Empty messages go, neighbours of one role are joined, what stands before the first user message (but a system
    message) and after the last answer goes.  Empty if nothing is left.
    """
    kept: list[tuple[str, str]] = []
    for role, text in messages:
        if not text.strip():
            tally.change("empty messages left out")
        elif role == ASSISTANT and not any(r == USER for r, _ in kept):
            tally.change("answers before the first question left out")
        elif kept and kept[-1][0] == role:
            kept[-1] = (role, f"{kept[-1][1]}\n\n{text}")
            tally.change("neighbouring messages of one role joined")
        elif role == SYSTEM and kept:
            tally.change("system messages after the first left out")
        else:
            kept.append((role, text))
    while kept and kept[-1][0] != ASSISTANT:
        tally.change("messages after the last answer left out")
        kept.pop()
    return tuple(kept)
