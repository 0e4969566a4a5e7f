"""How long a batch takes alone on the GPU: three models behind one method.

Owns arithmetic on shapes and device constants.  Knows no clock, no link and no other batch.

Phases: ENTRY is attention and gate of layer 0; the JOB of layer l is MoE l, then attention and gate l + 1;
the JOB of the last layer is MoE only; HEAD is the LM head.  So a step in one group costs, over L layers,
L (a + b E + c n) + K with the symbols of ``Affine``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from conf.models import ModelConfig
from policies.core.types import Phase


class JobTimes(Protocol):
    """Seconds of a batch."""

    @property
    def request_s(self) -> Callable[[int], float]:
        """Seconds a layer that one request adds, by its context in tokens."""
        ...

    @property
    def extrapolated(self) -> bool:
        """True once a time was asked for outside what was measured."""
        ...

    def seconds(self, phase: Phase, layer: int, n_requests: int, n_experts: int, requests_s: float) -> float:
        """Time of one batch of ``n_requests`` that needs ``n_experts`` distinct experts.

        ``requests_s``: the sum of ``request_s`` over its requests.
        """
        ...


@dataclass(frozen=True, slots=True)
class Affine:
    """t = a + b E + c n for a layer and group of n requests with E distinct experts; K a step for the head.

    ``layer_s`` is a, of which ``attention_share`` precedes the experts; ``expert_s`` b; ``request_s`` gives c for
    a context; ``head_s`` K.  ``dense_s``: fixed time of the dense layers before the first MoE layer, and
    ``dense_layers`` how many there are (each adds c n to ENTRY).
    """

    n_layers: int
    layer_s: float
    attention_share: float
    expert_s: float
    request_s: Callable[[int], float]
    head_s: float
    dense_s: float = 0.0
    dense_layers: int = 0

    @property
    def extrapolated(self) -> bool:
        """Never: the form is taken to hold everywhere."""
        return False

    def seconds(self, phase: Phase, layer: int, n_requests: int, n_experts: int, requests_s: float) -> float:
        """See ``JobTimes.seconds``; ``n_requests`` is already in ``requests_s``."""
        if phase is Phase.JOB:
            if layer < self.n_layers - 1:
                return self.layer_s + self.expert_s * n_experts + requests_s
            return self.layer_s * (1.0 - self.attention_share) + self.expert_s * n_experts
        if phase is Phase.ENTRY:
            return self.layer_s * self.attention_share + self.dense_s + (1 + self.dense_layers) * requests_s
        return self.head_s


def roofline(
    model: ModelConfig,
    *,
    memory_bytes_per_s: float,
    dense_efficiency: float,
    expert_efficiency: float,
    launch_s: float,
    request_launch_s: float = 0.0,
) -> Affine:
    """Job times from sizes and bandwidths: decoding reads every weight and state once a batch.

    Dense weights and states are read at ``dense_efficiency`` of the memory's rate, experts at
    ``expert_efficiency`` of that; ``launch_s`` a layer and ``request_launch_s`` a request and layer cost time
    whatever is read.
    """
    dense_bytes_per_s = memory_bytes_per_s * dense_efficiency
    layers = model.all_layers

    def request_s(context_tokens: int) -> float:
        return request_launch_s + model.state_bytes(context_tokens) / layers / dense_bytes_per_s

    before, beside = model.attention_bytes_per_layer, model.shared_bytes_per_layer
    return Affine(
        n_layers=model.n_layers,
        layer_s=launch_s + (before + beside) / dense_bytes_per_s,
        attention_share=model.attention_share,
        expert_s=model.expert_bytes / (dense_bytes_per_s * expert_efficiency),
        request_s=request_s,
        head_s=model.head_bytes / dense_bytes_per_s,
        dense_s=model.dense_layers * launch_s + model.dense_bytes / dense_bytes_per_s,
        dense_layers=model.dense_layers,
    )


@dataclass(frozen=True, slots=True)
class SmallProducts:
    """Products that no job-time model holds: t = kernels x kernel_s + max(bytes / rate, multiply-adds / rate).

    ``bytes_per_s``: weights of a matrix-vector product; ``operations_per_s``: multiply-adds; ``kernel_s``: what a small
    kernel that waits for the one before it takes beside its work.
    """

    bytes_per_s: float
    operations_per_s: float
    kernel_s: float

    def seconds(self, kernels: int, n_bytes: float, operations: float) -> float:
        """Time of ``kernels`` kernels, one after the other, that read and multiply so much in all."""
        return kernels * self.kernel_s + max(n_bytes / self.bytes_per_s, operations / self.operations_per_s)


class Curve:
    """A measured function of one whole number, linear between points and beyond both ends."""

    __slots__ = ("_xs", "_ys")

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        self._xs = [x for x, _ in points]
        self._ys = [y for _, y in points]

    def covers(self, x: float) -> bool:
        """True if ``x`` lies between the first and the last point."""
        return self._xs[0] <= x <= self._xs[-1]

    def __call__(self, x: float) -> float:
        """The value at ``x``."""
        xs, ys = self._xs, self._ys
        if len(xs) == 1:
            return ys[0]
        i = min(max(bisect_right(xs, x), 1), len(xs) - 1)
        slope = (ys[i] - ys[i - 1]) / (xs[i] - xs[i - 1])
        return ys[i - 1] + slope * (x - xs[i - 1])


class Table:
    """Measured times: t = f(n) + g(E), f by number of requests, g by number of distinct experts.

    Measurements vary n with the experts that n requests need, so f is the job without its expert kernels and g
    the kernels.  Never negative.
    """

    def __init__(
        self,
        *,
        n_layers: int,
        requests: Curve,
        experts: Curve,
        attention_share: float,
        request_s: Callable[[int], float],
        head_s: float,
    ) -> None:
        self._last_layer = n_layers - 1
        self._requests = requests
        self._experts = experts
        self._share = attention_share
        self._head_s = head_s
        self.request_s = request_s
        self.extrapolated = False

    def seconds(self, phase: Phase, layer: int, n_requests: int, n_experts: int, requests_s: float) -> float:
        """See ``JobTimes.seconds``."""
        if phase is Phase.HEAD:
            return self._head_s
        if not self._requests.covers(n_requests):
            self.extrapolated = True
        dense_s = self._requests(n_requests)
        if phase is Phase.ENTRY:
            return max(0.0, dense_s * self._share + requests_s)
        if not self._experts.covers(n_experts):
            self.extrapolated = True
        expert_s = self._experts(n_experts)
        if layer == self._last_layer:
            return max(0.0, dense_s * (1.0 - self._share) + expert_s)
        return max(0.0, dense_s + expert_s + requests_s)
