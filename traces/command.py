"""Command lines of the form ``key=value``: parsing, help, and errors as one line with exit code 2."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence

from policies.core.types import UserError

Arguments = dict[str, str]


def parse(argv: Sequence[str], keys: Sequence[str], positional: str | None = None) -> Arguments:
    """``key=value`` words as a dict; one word without ``=`` is the value of ``positional``."""
    arguments: Arguments = {}
    for word in argv:
        key, equals, value = word.partition("=")
        if positional is not None and positional not in arguments and (not equals or key not in keys):
            key, value = positional, word
        elif key not in keys:
            raise UserError(f"unknown argument {word}; expected {'FILE and ' if positional else ''}{'=, '.join(keys)}=")
        if key in arguments:
            raise UserError(f"{key} is given twice")
        arguments[key] = value
    return arguments


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


def run(main: Callable[[Sequence[str]], int], usage: str | None) -> int:
    """Run a command on ``sys.argv``: its exit code, or 2 after one line of error."""
    argv = sys.argv[1:]
    try:
        if "--help" in argv or "-h" in argv:
            print((usage or "").strip())
            return 0
        return main(argv)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of our output has left, as in `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
