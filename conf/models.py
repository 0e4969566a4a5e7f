"""Model configurations: sizes derived from shapes and quantisation.

Owns the arithmetic from a model's published shapes to parameters and bytes.  Knows no device, no time
and no cache.  Every byte here is a stored weight or a cached state; activations are not counted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from policies.core.types import ModelSpec, UserError

_KV_BYTES = 2  # keys and values are cached in fp16
_STATE_BYTES = 4  # a linear-attention state is kept in f32


@dataclass(frozen=True, slots=True)
class Quantisation:
    """Bytes per weight of each kind of tensor.

    ``small``: routers, norms, biases, short convolutions.  ``packs_bias``: whether an expert's biases are
    stored with its matrices; GGUF keeps them as separate f32 tensors that stay resident.
    """

    matrix: Fraction
    small: Fraction
    head: Fraction
    packs_bias: bool


QUANTISATIONS: Mapping[str, Quantisation] = {
    "f32": Quantisation(Fraction(4), Fraction(4), Fraction(4), packs_bias=True),
    "bf16": Quantisation(Fraction(2), Fraction(2), Fraction(2), packs_bias=True),
    # GGUF files: 32 weights in 18 bytes; router and norms f32; the head in Q6_K, 256 weights in 210 bytes.
    "q4_0": Quantisation(Fraction(18, 32), Fraction(4), Fraction(210, 256), packs_bias=False),
}

_ATTENTION_KINDS = ("full", "sliding", "mla", "linear")


@dataclass(frozen=True, slots=True)
class Attention:
    """One kind of attention layer and how many layers have it.

    ``full`` and ``sliding``: grouped-query attention; ``mla``: DeepSeek's latent attention (``head_dim`` is the
    part of a head without rotary embedding); ``linear``: Gated DeltaNet (``kv_heads`` key heads, ``heads`` value
    heads).  ``bias`` and ``qk_norm`` count the extra parameters of one layer.
    """

    kind: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    window_tokens: int = 0
    output_gate: bool = False
    key_is_value: bool = False
    kv_rank: int = 0
    rope_dim: int = 0
    conv_width: int = 0
    bias: int = 0
    qk_norm: int = 0

    def matrix_parameters(self, hidden: int) -> int:
        """Weights of the projections of one layer."""
        query = self.heads * self.head_dim
        key = self.kv_heads * self.head_dim
        if self.kind == "mla":
            down = hidden * (self.kv_rank + self.rope_dim)
            up = self.kv_rank * self.heads * 2 * self.head_dim
            return hidden * self.heads * (self.head_dim + self.rope_dim) + down + up + query * hidden
        if self.kind == "linear":
            mixed = 2 * key + query  # queries and keys have kv_heads heads, values have heads
            return hidden * (mixed + query + 2 * self.heads) + query * hidden
        projections = query * (2 if self.output_gate else 1) + key * (1 if self.key_is_value else 2)
        return hidden * projections + query * hidden

    def small_parameters(self) -> int:
        """Biases, norms inside the attention, convolution: what is never quantised."""
        small = self.bias + self.qk_norm
        if self.kind == "linear":
            small += (2 * self.kv_heads + self.heads) * self.head_dim * self.conv_width + 2 * self.heads
        return small

    def state_bytes(self, context_tokens: int) -> float:
        """Cached state that one request reads (and, if linear, writes) in one of these layers and one step."""
        if self.kind == "linear":
            return 2.0 * self.heads * self.head_dim * self.head_dim * _STATE_BYTES
        if self.kind == "mla":
            return float(context_tokens * (self.kv_rank + self.rope_dim) * _KV_BYTES)
        tokens = min(context_tokens, self.window_tokens) if self.kind == "sliding" else context_tokens
        return float(tokens * 2 * self.kv_heads * self.head_dim * _KV_BYTES)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model's shapes and quantisation, and everything that follows from them.

    ``n_layers`` counts MoE layers; ``dense_layers`` come before them.  ``shared_intermediate``: the width of what
    every token passes beside the experts (shared experts, or Gemma4's parallel MLP); ``shared_gate``: its gate's
    parameters.  ``router_extra`` and ``norm_vectors``: small parameters of one layer beyond the router matrix (the
    latter in vectors of ``hidden``).
    """

    name: str
    label: str
    hidden: int
    n_layers: int
    n_experts: int
    top_k: int
    expert_intermediate: int
    vocabulary: int
    quantisation: str
    attention: tuple[Attention, ...]
    tied_head: bool = False
    expert_bias: bool = False
    shared_intermediate: int = 0
    shared_gate: bool = False
    dense_layers: int = 0
    dense_intermediate: int = 0
    router_extra: int = 0
    norm_vectors: int = 2

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read a ``conf/model/*.yaml`` mapping.

        Raises:
            UserError: a key is missing, unknown or out of range; the message names it.
        """
        values = _known(config, cls, "model")
        name = str(values.get("name", "?"))
        raw = values.get("attention")
        if not isinstance(raw, Sequence) or isinstance(raw, str) or not raw:
            raise UserError(f"model {name}: attention must be a list of layer kinds, got {raw!r}")
        values["attention"] = tuple(_attention(entry, f"model {name}: attention[{i}]") for i, entry in enumerate(raw))
        for field in ("name", "label", "quantisation"):
            if not isinstance(values.get(field), str):
                raise UserError(f"model {name}: {field} is {values.get(field)!r}, expected a text")
        _check_fields(values, cls, f"model {name}")
        model = cls(**values)
        model._check()
        return model

    def _check(self) -> None:
        where = f"model {self.name}"
        if self.quantisation not in QUANTISATIONS:
            known = ", ".join(QUANTISATIONS)
            raise UserError(f"{where}: unknown quantisation {self.quantisation!r}; use one of: {known}")
        for field in ("hidden", "expert_intermediate", "vocabulary", "norm_vectors"):
            if getattr(self, field) < 1:
                raise UserError(f"{where}: {field} is {getattr(self, field)}, expected at least 1")
        if self.dense_layers and self.dense_intermediate < 1:
            raise UserError(f"{where}: dense_layers is {self.dense_layers}, so dense_intermediate must be at least 1")
        _ = self.spec  # checks layers, experts and top-k
        layers = sum(kind.layers for kind in self.attention)
        if layers != self.all_layers:
            raise UserError(
                f"{where}: attention lists {layers} layers, expected n_layers + dense_layers = {self.all_layers}"
            )

    @property
    def spec(self) -> ModelSpec:
        """The routing shape, which is all that decisions depend on."""
        return ModelSpec(self.name, self.n_layers, self.n_experts, self.top_k)

    @property
    def all_layers(self) -> int:
        """Layers of the decoder, dense ones included."""
        return self.n_layers + self.dense_layers

    @property
    def quantised(self) -> Quantisation:
        """Bytes per weight."""
        return QUANTISATIONS[self.quantisation]

    # ---------------------------------------------------------------- parameters

    @property
    def expert_parameters(self) -> int:
        """Weights of one expert's three matrices, without biases."""
        return 3 * self.hidden * self.expert_intermediate

    @property
    def expert_bias_parameters(self) -> int:
        """Biases of one expert."""
        return 2 * self.expert_intermediate + self.hidden if self.expert_bias else 0

    @property
    def body_parameters(self) -> int:
        """Every weight but experts, embedding and head."""
        return sum(self._body_counts())

    @property
    def head_parameters(self) -> int:
        """Weights of the LM head (the embedding's, where they are tied)."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """Weights of the whole text model."""
        experts = self.spec.n_total * (self.expert_parameters + self.expert_bias_parameters)
        tables = self.head_parameters * (1 if self.tied_head else 2)
        return experts + self.body_parameters + tables + self.hidden  # one final norm

    # --------------------------------------------------------------------- bytes

    @property
    def expert_bytes(self) -> int:
        """One expert as it is stored and fetched."""
        stored = self.expert_parameters * self.quantised.matrix
        if self.quantised.packs_bias:
            stored += self.expert_bias_parameters * self.quantised.small
        return int(stored)

    @property
    def body_matrix_bytes(self) -> float:
        """Quantised part of the body."""
        return float(self._body_counts()[0] * self.quantised.matrix)

    @property
    def body_small_bytes(self) -> float:
        """Routers, norms and biases of the body."""
        return float(self._body_counts()[1] * self.quantised.small)

    @property
    def body_bytes(self) -> float:
        """Every weight but experts, embedding and head: what a step reads at least once."""
        return self.body_matrix_bytes + self.body_small_bytes

    @property
    def body_bytes_per_layer(self) -> float:
        """Mean over all decoder layers."""
        return self.body_bytes / self.all_layers

    @property
    def head_bytes(self) -> float:
        """The LM head, read once a step."""
        return float(self.head_parameters * self.quantised.head)

    @property
    def attention_bytes_per_layer(self) -> float:
        """Attention, gate and norms of one MoE layer: what precedes its experts."""
        matrices, small = self._attention_counts()
        gate = self.n_experts * self.hidden + self.router_extra
        return float(
            (matrices * self.quantised.matrix + small * self.quantised.small) / self.all_layers
            + gate * self.quantised.small
        )

    @property
    def shared_bytes_per_layer(self) -> float:
        """What one MoE layer runs beside its experts."""
        gate = self.hidden if self.shared_gate else 0
        return float(3 * self.hidden * self.shared_intermediate * self.quantised.matrix + gate * self.quantised.small)

    @property
    def dense_bytes(self) -> float:
        """The dense layers before the first MoE layer, with their attention."""
        matrices, small = self._attention_counts()
        attention = (matrices * self.quantised.matrix + small * self.quantised.small) / self.all_layers
        return float(
            self.dense_layers * (attention + 3 * self.hidden * self.dense_intermediate * self.quantised.matrix)
        )

    @property
    def attention_share(self) -> float:
        """Share of an MoE layer's body that precedes its experts."""
        before = self.attention_bytes_per_layer
        return before / (before + self.shared_bytes_per_layer)

    def state_bytes(self, context_tokens: int) -> float:
        """State that one request with this context reads and writes in one step, over all layers."""
        return sum(kind.layers * kind.state_bytes(context_tokens) for kind in self.attention)

    def describe(self) -> dict[str, Any]:
        """Derived sizes for a run's record."""
        return {
            "name": self.name,
            "label": self.label,
            "quantisation": self.quantisation,
            "experts": self.spec.n_total,
            "expert_bytes": self.expert_bytes,
            "body_bytes": self.body_bytes,
            "head_bytes": self.head_bytes,
        }

    def _attention_counts(self) -> tuple[int, int]:
        """Matrix and small parameters of attention and norms, all layers."""
        matrices = sum(kind.layers * kind.matrix_parameters(self.hidden) for kind in self.attention)
        small = sum(kind.layers * kind.small_parameters() for kind in self.attention)
        return matrices, small + self.all_layers * self.norm_vectors * self.hidden

    def _body_counts(self) -> tuple[int, int]:
        """Matrix and small parameters of the whole body."""
        matrices, small = self._attention_counts()
        matrices += 3 * self.hidden * self.shared_intermediate * self.n_layers
        matrices += 3 * self.hidden * self.dense_intermediate * self.dense_layers
        small += self.n_layers * (self.n_experts * self.hidden + self.router_extra)
        small += self.n_layers * (self.hidden if self.shared_gate else 0)
        return matrices, small


def _known(config: Mapping[str, Any], cls: type, where: str) -> dict[str, Any]:
    """A plain copy of ``config`` whose keys are fields of the dataclass ``cls``."""
    if not isinstance(config, Mapping):
        raise UserError(f"{where}: expected a mapping of shapes, got {config!r}")
    names = [field.name for field in dataclasses.fields(cls)]
    values = {str(key): config[key] for key in config}
    for key in values:
        if key not in names:
            raise UserError(f"{where}: unknown key {key!r}; expected some of: {', '.join(names)}")
    for field in dataclasses.fields(cls):
        if field.name not in values and field.default is dataclasses.MISSING:
            raise UserError(f"{where}: key {field.name!r} is missing")
    return values


def _check_fields(values: Mapping[str, Any], cls: type, where: str) -> None:
    """Integers are integers and not negative, flags are flags."""
    for field in dataclasses.fields(cls):
        value = values.get(field.name, 0 if field.type == "int" else False)
        if field.type == "int" and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise UserError(f"{where}: {field.name} is {value!r}, expected a whole number of at least 0")
        if field.type == "bool" and not isinstance(value, bool):
            raise UserError(f"{where}: {field.name} is {value!r}, expected true or false")


def _attention(config: Any, where: str) -> Attention:
    values = _known(config, Attention, where)
    _check_fields(values, Attention, where)
    attention = Attention(**values)
    if attention.kind not in _ATTENTION_KINDS:
        raise UserError(f"{where}: unknown kind {attention.kind!r}; use one of: {', '.join(_ATTENTION_KINDS)}")
    needed = {"full": (), "sliding": ("window_tokens",), "mla": ("kv_rank", "rope_dim"), "linear": ("conv_width",)}
    for field in ("layers", "heads", "kv_heads", "head_dim", *needed[attention.kind]):
        if getattr(attention, field) < 1:
            raise UserError(f"{where}: {field} is {getattr(attention, field)}, expected at least 1")
    return attention
