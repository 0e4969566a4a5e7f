"""Command lines of the form ``key=value``: parsing, help, and errors as one line with exit code 2.

Owns their form; knows none of the keys.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Mapping, Sequence

from policies.core.types import UserError

Arguments = dict[str, str]


def parse(
    argv: Sequence[str], keys: Sequence[str], positional: str | None = None, prefixes: Sequence[str] = ()
) -> Arguments:
    """``key=value`` words as a dict; one word without ``=`` is the value of ``positional``.

    ``prefixes``: keys that begin so are taken as they are (``config.`` takes ``config.hidden_size=64``).
    Raises UserError: no ``=``, an unknown key (the nearest is named) or a repeated one.
    """
    arguments: Arguments = {}
    for word in argv:
        key, equals, value = word.partition("=")
        known = key in keys or key.startswith(tuple(prefixes))
        if positional is not None and positional not in arguments and not (equals and known):
            key, value = positional, word
        elif not equals or not value:
            raise UserError(f"{word} is not key=value; expected {_expected(keys, positional)}")
        elif not known:
            near = difflib.get_close_matches(key, keys, 1)
            raise UserError(
                f"unknown key {key}; "
                + (f"did you mean {near[0]}?" if near else f"expected {_expected(keys, positional)}")
            )
        if key in arguments:
            raise UserError(f"{key} is given twice")
        arguments[key] = value
    return arguments


def _expected(keys: Sequence[str], positional: str | None) -> str:
    return f"{'FILE and ' if positional else ''}{'=, '.join(keys)}="


def split(argv: Sequence[str], own: Sequence[str]) -> tuple[Arguments, list[str]]:
    """A command's own keys, and all other words in their order."""
    mine = [word for word in argv if word.partition("=")[0] in own]
    return parse(mine, own), [word for word in argv if word not in mine]


def whole_number(arguments: Mapping[str, str], key: str, least: int = 1) -> int | None:
    """A whole number from the arguments, or None if it is not given."""
    text = arguments.get(key)
    if text is None:
        return None
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise UserError(f"{key} is {text}, expected a whole number from {least}")
    return value


def flag(arguments: Mapping[str, str], key: str, default: bool = False) -> bool:
    """``true`` or ``false``."""
    text = arguments.get(key, str(default).lower())
    if text not in ("true", "false"):
        raise UserError(f"{key} is {text}, expected true or false")
    return text == "true"


def run(
    main: Callable[[Sequence[str]], int],
    usage: str | Callable[[], str] | None,
    argv: Sequence[str] | None = None,
    interrupted: str | None = None,
) -> int:
    """Run a command on ``argv`` (None: ``sys.argv``): its exit code, or 2 after one line of error.

    ``usage``: the help, or what makes it when it is asked for.  ``interrupted``: what Ctrl-C left behind.
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        if "--help" in argv or "-h" in argv:
            print(((usage() if callable(usage) else usage) or "").strip())
            return 0
        return main(argv)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of our output has left, as in `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        if interrupted is not None:
            print(f"error: interrupted; {interrupted}", file=sys.stderr)
        return 130
