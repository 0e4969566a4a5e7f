"""What can be wrong with a pack or a fetch, as one line for the user.

Owns the two error types; knows nothing of how they are raised.
"""

from __future__ import annotations

from policies.core.types import ExpertId, UserError


class PackError(UserError):
    """A checkpoint or a pack is not what it should be."""


class FetchError(UserError):
    """One expert could not be read: the run ends, because its tokens would be wrong."""

    def __init__(self, expert: ExpertId, label: str, offset: int, reason: str) -> None:
        """``label`` is ``layer:index``; ``offset`` is the expert's first byte in ``experts.bin``."""
        super().__init__(f"expert {label} at offset {offset} of experts.bin: {reason}")
        self.expert = expert
        self.label = label
        self.offset = offset
        self.reason = reason


def shown(value: object, limit: int = 60) -> str:
    """``repr`` of a value from an untrusted file, on one line and cut to ``limit`` characters."""
    text = repr(value).replace("\n", " ")
    return text if len(text) <= limit else text[: limit - 3] + "..."
