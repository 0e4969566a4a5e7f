"""``key=value`` arguments of the pack's commands.

Owns their parsing and the form of their errors; knows none of the keys.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from policies.core.types import UserError


def parse(arguments: Sequence[str], known: Iterable[str], prefixes: Sequence[str] = ()) -> dict[str, str]:
    """``{key: value}`` of ``key=value`` arguments.

    ``prefixes``: keys that begin so are taken as they are (``config.`` takes ``config.hidden_size=64``).

    Raises:
        UserError: no ``=``, an unknown key (the nearest is named) or a repeated one.
    """
    names = list(known)
    given: dict[str, str] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or not value:
            raise UserError(f"argument {argument!r} is not key=value; keys: {', '.join(names)}")
        if key not in names and not key.startswith(tuple(prefixes)):
            near = difflib.get_close_matches(key, names, 1)
            advice = f"did you mean {near[0]}?" if near else f"keys: {', '.join(names)}"
            raise UserError(f"unknown key {key!r}; {advice}")
        if key in given:
            raise UserError(f"key {key!r} is given twice")
        given[key] = value
    return given


def whole_number(key: str, text: str, least: int = 0) -> int:
    """A whole number of at least ``least``."""
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise UserError(f"{key}={text!r} is not a whole number of at least {least}")
    return value


def flag(key: str, text: str) -> bool:
    """``true`` or ``false``."""
    if text not in {"true", "false"}:
        raise UserError(f"{key}={text!r}: expected true or false")
    return text == "true"


def split(arguments: Sequence[str], own: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """A command's own keys, and all other words in their order."""
    mine = [word for word in arguments if word.partition("=")[0] in own]
    return parse(mine, own), [word for word in arguments if word not in mine]
