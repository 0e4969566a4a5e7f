"""The row rule: a row's bits never depend on who shares its group.

A library picks its kernel by the shape of a product, so the same row can come out different when it
is computed among other numbers of rows.  Here every matrix product of the decode path has a fixed
number of rows, the tile; groups are padded to it or cut into several.  ``check_products`` tests on
the machine itself, at the real shapes and layouts, that this is enough: a tiny model does not show
the fault.  Knows nothing of requests, layers or files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from policies.core.types import UserError


class RowRuleError(UserError):
    """This machine computes a row differently in different company; tokens would depend on the schedule."""


def tile_rows(device: torch.device | str) -> int:
    """Rows of every product: 8 on a CPU; 16, the height of a tensor core's operand, on CUDA."""
    return 16 if torch.device(device).type == "cuda" else 8


def tiles(rows: Sequence[int], tile: int, pad: int) -> list[list[int]]:
    """Row numbers in lists of exactly ``tile``, the last one filled up with ``pad``."""
    cut = [list(rows[i : i + tile]) for i in range(0, len(rows), tile)]
    cut[-1] += [pad] * (tile - len(cut[-1]))
    return cut


def row_depends_on_neighbours(weight: Tensor, tile: int, generator: torch.Generator) -> bool:
    """True if a row of ``x @ weight.T``, x [tile, K], changes with its place or with the rows beside it.

    ``weight``: [N, K].  Compares bits: a tolerance cannot tell this from a bug.
    """
    k = weight.shape[1]
    x = torch.randn(tile, k, generator=generator, dtype=torch.float32).to(weight.device, weight.dtype)
    alone = torch.zeros_like(x)
    alone[0] = x[-1]
    together = functional.linear(x, weight)
    moved = functional.linear(x.roll(tile // 2 - 1, 0), weight).roll(1 - tile // 2, 0)
    return not (torch.equal(together, moved) and torch.equal(together[-1], functional.linear(alone, weight)[0]))


def check_products(weights: Iterable[tuple[str, Tensor]], tile: int) -> int:
    """Test one weight of every distinct shape, layout and dtype; returns how many were tested.

    Run it before decoding, with the number of threads that decoding will use.  Raises RowRuleError
    naming the products that break the rule.
    """
    generator = torch.Generator().manual_seed(0)
    distinct: dict[tuple[object, ...], tuple[str, Tensor]] = {}
    for name, weight in weights:
        distinct.setdefault((*weight.shape, weight.dtype, weight.stride()), (name, weight))
    with torch.inference_mode():
        bad = [f"{n} {tuple(w.shape)}" for n, w in distinct.values() if row_depends_on_neighbours(w, tile, generator)]
    if bad:
        raise RowRuleError(
            f"a row's bits depend on its neighbours in {', '.join(bad)} with tiles of {tile} rows and "
            f"{torch.get_num_threads()} threads, so tokens would change with the schedule; "
            "set another number of threads or another dtype"
        )
    return len(distinct)
