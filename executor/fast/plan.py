"""One decoder layer as the fast path sees it: merged weights, and which of the few kinds of step it takes.

Owns the vocabulary that families are translated into (``executor.fast.families``) and that ``executor.fast.steps``
carries out.  Holds no state of requests.  Norm weights are float32 [H] factors, whatever a family stores.  Merged
weights may have rows of zeros behind those that are named.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from executor.cache import DeltaState, KvCache
from executor.kernels.values import Activation, MixRule


@dataclass(frozen=True, slots=True)
class Attention:
    """Softmax attention over a ``KvCache``.

    ``qkv``: [>= W, H], one product for queries, keys and values.  In a row of its result query head h begins at
    ``h * q_stride``, key head h at ``k_at + h * head_dim``, value head h at ``v_at + h * head_dim``.
    ``gated``: the ``head_dim`` numbers behind each query head are an output gate (before the sigmoid).
    ``q_norm``, ``k_norm``: [head_dim]; ``v_norm``: values are normed without weights.  ``cos``, ``sin``: [positions,
    rotary dim].
    """

    cache: KvCache
    qkv: Tensor
    out: Tensor  # [H, heads * head_dim]
    heads: int
    kv_heads: int
    head_dim: int
    q_stride: int
    k_at: int
    v_at: int
    scaling: float
    cos: Tensor
    sin: Tensor
    gated: bool = False
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    v_norm: bool = False


@dataclass(frozen=True, slots=True)
class Delta:
    """Gated DeltaNet over a ``DeltaState``.

    ``projection``: [>= channels + values + 2 * value heads, H]: convolution's input, output gate z, write strength b,
    decay a.  ``conv``: [channels, kernel] float32.  ``norm``: [value dim] float32.
    """

    state: DeltaState
    projection: Tensor
    out: Tensor  # [H, values]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    norm_eps: float


@dataclass(frozen=True, slots=True)
class Router:
    """``weight``: [>= E, H]."""

    norm: Tensor
    weight: Tensor
    rule: MixRule
    expert_scale: Tensor | None = None  # [E] float32


@dataclass(frozen=True, slots=True)
class Dense:
    """What every token passes beside its experts: a gated MLP.

    ``gate_up``: [>= 2 * width, H]; with ``gated`` row ``2 * width`` is the weight of a sigmoid gate of the output.
    ``norm``: of its input; None: it reads what the experts read.
    """

    gate_up: Tensor
    down: Tensor  # [H, width]
    width: int
    gated: bool = False
    norm: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """Attention, router, experts.  Norms that a family has not are None.

    The residual stream after the attention: ``residual + attended(after_attention)``.  After the MoE:
    ``(residual + merged(routed(routed_norm) + dense(dense_norm))) * scale``.
    """

    attention: Attention | Delta
    attention_norm: Tensor
    router: Router
    expert_norm: Tensor
    dense: Dense | None = None
    after_attention: Tensor | None = None
    routed_norm: Tensor | None = None
    dense_norm: Tensor | None = None
    merged_norm: Tensor | None = None
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole model but its experts.  ``embedding_scale`` multiplies embedded tokens; ``cap``: of the logits.

    ``predict``: how many experts each gate predicts for the layer after its own, by applying that layer's router to
    what it has read itself, under that router's own norm where ``router_reads_stream``.
    """

    embedding: Tensor  # [V, H]
    embedding_scale: float
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Tensor  # [V, H]
    cap: float | None
    activation: Activation
    eps: float
    top_k: int
    n_experts: int
    predict: int = 0
    router_reads_stream: bool = False
