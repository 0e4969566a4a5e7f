"""What a language model must beat: a byte model of order 3, counted on the same text.

usage: python -m traces.demo.ngram code=DIR prose=DIR      (the folders that the model was trained on)

Interpolated Witten-Bell smoothing (Bell, Cleary and Witten, Text Compression, 1990) from order 3 down to a uniform
guess over the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from policies.core.types import UserError
from traces.command import parse, run
from traces.demo.corpus import END, Tokens, read_domain

SYMBOLS = END + 1
Keys = NDArray[np.int64]


def main(argv: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    arguments = parse(argv, ("code", "prose"))
    if not arguments:
        raise UserError("which text? usage: python -m traces.demo.ngram code=DIR prose=DIR")
    for name, folder in arguments.items():
        domain = read_domain(name, folder)
        print(f"{name}: {bits_per_byte(domain.train, domain.held_out):.3f} bits per byte, order 3")
    return 0


def bits_per_byte(train: Tokens, held_out: Tokens, order: int = 3) -> float:
    """Mean code length of the bytes of ``held_out``, in bits; ``END`` tokens are context but are not counted."""
    counted = held_out[order:] != END
    p = np.full(int(counted.sum()), 1.0 / (SYMBOLS - 1))
    for n in range(order + 1):
        grams, uses = np.unique(_keys(train, n + 1), return_counts=True)
        contexts, first, kinds = np.unique(grams // SYMBOLS, return_index=True, return_counts=True)
        totals = np.add.reduceat(uses, first)
        wanted = _keys(held_out, n + 1)[order - n :][counted]
        seen = _look_up(grams, uses, wanted)
        total, kind = (_look_up(contexts, values, wanted // SYMBOLS) for values in (totals, kinds))
        known = total > 0
        p[known] = (seen + kind * p)[known] / (total + kind)[known]
    return float(-np.log2(p).mean())


def _keys(tokens: Tokens, n: int) -> Keys:
    """Every run of ``n`` tokens as one number, the last token in the lowest place."""
    length = len(tokens) - n + 1
    keys = np.zeros(length, np.int64)
    for i in range(n):
        keys = keys * SYMBOLS + tokens[i : i + length]
    return keys


def _look_up(keys: Keys, values: Keys, wanted: Keys) -> Keys:
    """The value of each wanted key, 0 where it is not there; ``keys`` ascend."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)


if __name__ == "__main__":
    raise SystemExit(run(main, __doc__))
