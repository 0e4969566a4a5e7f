"""Partitions: which requests move together through a step (paper §3.2, §5.4.1)."""

from __future__ import annotations

from collections.abc import Sequence

from policies.core.types import RequestId, UserError


class PerRequest:
    """Every request moves alone: runahead inference."""

    def units(self, requests: tuple[RequestId, ...]) -> Sequence[tuple[RequestId, ...]]:
        """One unit a request."""
        return [(request,) for request in requests]


class OneUnit:
    """All requests move together: conventional batching."""

    def units(self, requests: tuple[RequestId, ...]) -> Sequence[tuple[RequestId, ...]]:
        """One unit."""
        return [requests] if requests else []


class Sizes:
    """Static grouping: units of fixed sizes, filled in the order of the requests.

    With fewer requests than the sizes add up to (some have left), the last units are short or absent.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        if not sizes or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
            raise UserError(
                f"schedule.partition.sizes is {list(sizes)}, expected whole numbers of at least 1, as in [3, 3]"
            )
        self.sizes = tuple(sizes)

    def units(self, requests: tuple[RequestId, ...]) -> Sequence[tuple[RequestId, ...]]:
        """Consecutive units of the given sizes."""
        if len(requests) > sum(self.sizes):
            raise UserError(
                f"static groups of {list(self.sizes)} hold {sum(self.sizes)} requests but a step has {len(requests)}; "
                "make the sizes add up to the concurrency"
            )
        units, start = [], 0
        for size in self.sizes:
            units.append(requests[start : start + size])
            start += size
        return [unit for unit in units if unit]
