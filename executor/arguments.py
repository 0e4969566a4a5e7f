"""``key=value`` arguments of the pack's commands.

Owns their parsing, exit codes and the form of their errors; knows none of the keys.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable, Sequence

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


def command(
    arguments: Sequence[str], usage: Callable[[], str], run: Callable[[Sequence[str]], object], interrupted: str
) -> int:
    """Run a command; its exit status: 0, 2 for bad input (or none at all), 130 if interrupted.

    ``usage``: the help text, made only when it is shown.  ``interrupted``: what Ctrl-C left behind.
    """
    if not arguments or {"--help", "-h"} & set(arguments):
        print(usage(), end="")
        return 0 if arguments else 2
    try:
        run(arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"error: interrupted; {interrupted}", file=sys.stderr)
        return 130
    return 0
