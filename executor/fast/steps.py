"""Entry, job and head as sequences of launches on the current stream, with no wait and no allocation among them.

    entry   embed; attention and gate of layer 0
    job l   experts and dense MLP of layer l; attention and gate of layer l + 1
    head    final norm and LM head

Owns what requests carry between two jobs, one row each: residual stream (float32) and mixing weights.  Everything
else of a job lies in its ``Buffers``.  The ids that a gate chooses are written by its last kernel straight to the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from executor.fast.buffers import Buffers
from executor.fast.ops import Ops
from executor.fast.plan import Attention, Delta, Dense, Layer, Plan, Router
from executor.fast.rowwise import Embedding, Normed, Update
from executor.kernels.values import ExpertsShape, MixRule


class Steps:
    """``requests``: how many rows.  ``arena``: uint8, the slots of the expert cache, at ``shape.stride_bytes``."""

    def __init__(self, plan: Plan, ops: Ops, arena: Tensor, shape: ExpertsShape, requests: int) -> None:
        self.plan, self.shape = plan, shape
        self._ops, self._arena = ops, arena
        device, hidden = plan.embedding.device, plan.embedding.shape[1]
        self.residual = torch.zeros(requests, hidden, dtype=torch.float32, device=device)
        self.mix = torch.zeros(requests, plan.top_k, dtype=torch.float32, device=device)

    # ------------------------------------------------------------------ what is launched and captured

    def entry(self, b: Buffers, n: int) -> None:
        """For a group padded to ``n`` tokens; what they are stands in ``b.descriptor``."""
        b.descriptor.copy()
        plan, first = self.plan, self.plan.layers[0]
        source = Embedding(plan.embedding, b.descriptor.field("tokens", n), plan.embedding_scale)
        self._update(b, n, source, Normed(b.x, first.attention_norm))
        self._attend(b, n, 0)

    def job(self, b: Buffers, n: int, index: int) -> None:
        """The MoE of layer ``index``, then attention and gate of the next one, if there is one."""
        b.descriptor.copy()
        layer, following = self.plan.layers[index], self.plan.layers[index + 1 : index + 2]
        self._moe_inputs(b, n, layer)
        if layer.dense is not None:
            with b.aside():
                self._dense(b, layer.dense)
        self._ops.experts(
            self.shape,
            b.x if b.planes is None else b.planes,
            self._arena,
            b.descriptor.field("slots", n),
            b.descriptor.field("rows", n),
            self.mix,
            b.experts,
            b.routed,
        )
        if layer.dense is not None:
            b.join()
        self._update(b, n, self._merged(b, layer), *(Normed(b.x, after.attention_norm) for after in following))
        if following:
            self._attend(b, n, index + 1)

    def head(self, b: Buffers, n: int) -> None:
        """Logits [tile, V] of the group's next tokens, into ``b.vocabulary``."""
        b.descriptor.copy()
        self._update(b, n, None, Normed(b.x, self.plan.norm))
        torch.mm(b.x, self.plan.head.t(), out=b.vocabulary)
        if self.plan.cap is not None:
            b.vocabulary.div_(self.plan.cap).tanh_().mul_(self.plan.cap)

    # ------------------------------------------------------------------ MoE

    def _moe_inputs(self, b: Buffers, n: int, layer: Layer) -> None:
        """What experts and dense MLP read, from the residual stream."""
        dense, outs = layer.dense, list[Normed]()
        if b.planes is not None:
            outs.append(Normed(b.planes, layer.expert_norm, planes=True))
        if b.planes is None or (dense is not None and dense.norm is None):
            outs.append(Normed(b.x, layer.expert_norm))
        if dense is not None and dense.norm is not None:
            outs.append(Normed(b.dense_x, dense.norm))
        self._update(b, n, None, *outs)

    def _dense(self, b: Buffers, dense: Dense) -> None:
        gate_up, inner = b.gate_up(dense.gate_up.shape[0]), b.inner(dense.width)
        torch.mm(b.x if dense.norm is None else b.dense_x, dense.gate_up.t(), out=gate_up)
        self._ops.gate_and_up(gate_up, dense.width, self.plan.activation, inner)
        torch.mm(inner, dense.down.t(), out=b.dense)

    def _merged(self, b: Buffers, layer: Layer) -> Update:
        dense = layer.dense
        return Update(
            routed=b.routed,
            routed_norm=layer.routed_norm,
            dense=None if dense is None else b.dense,
            dense_norm=layer.dense_norm,
            gate=b.gate_up(dense.gate_up.shape[0])[:, 2 * dense.width] if dense is not None and dense.gated else None,
            merged_norm=layer.merged_norm,
            scale=layer.scale,
        )

    # ------------------------------------------------------------------ attention and gate

    def _attend(self, b: Buffers, n: int, index: int) -> None:
        """From ``b.x``, the normed input of layer ``index``'s attention, to the experts that its gate chooses."""
        layer, following = self.plan.layers[index], self.plan.layers[index + 1 : index + 2]
        a, router, field = layer.attention, layer.router, b.descriptor.field
        heads = self._softmax(b, n, a) if isinstance(a, Attention) else self._delta(b, n, a)
        torch.mm(heads, a.out.t(), out=b.attended)
        outs = [Normed(b.x, router.norm)]
        ahead = [after.router for after in following] if self.plan.predict else []
        if self.plan.router_reads_stream:
            outs += [Normed(b.ahead_x, other.norm) for other in ahead]
        update = Update(dense=b.attended, dense_norm=layer.after_attention)
        self._ops.update_rows_behind(self.residual, field("rows", n), self.plan.eps, update, tuple(outs))
        for other in ahead:
            self._predict(b, n, outs[-1].out, other)
        self._ops.route(
            self._logits(b, b.x, router),
            field("rows", n),
            self.mix,
            b.ids[:n],
            router.rule,
            n_experts=self.plan.n_experts,
            expert_scale=router.expert_scale,
            sequence=field("sequence", n),
            given=field("given", n),
        )

    def _predict(self, b: Buffers, n: int, x: Tensor, router: Router) -> None:
        """What ``router``, the next layer's, would choose on ``x``, best first, with its probabilities."""
        logits, rule = self._logits(b, x, router), MixRule(renormalise=False)
        self._ops.route(logits, b.every[:n], b.ahead_scores, b.ahead_ids[:n], rule, n_experts=self.plan.n_experts)

    def _logits(self, b: Buffers, x: Tensor, router: Router) -> Tensor:
        logits = b.logits(router.weight.shape[0])
        torch.mm(x, router.weight.t(), out=logits)
        return logits

    def _softmax(self, b: Buffers, n: int, a: Attention) -> Tensor:
        field, tile, dim = b.descriptor.field, b.tile, a.head_dim
        qkv = b.projected(a.qkv.shape[0])
        torch.mm(b.x, a.qkv.t(), out=qkv)
        heads = qkv[:, : a.heads * a.q_stride].view(tile, a.heads, a.q_stride)
        keys, values = (qkv[:, i : i + a.kv_heads * dim].view(tile, a.kv_heads, dim) for i in (a.k_at, a.v_at))
        queries, out = b.queries(a.heads, dim), b.heads(a.heads * dim)
        rows = field("rows", n)
        self._ops.rotate_and_store(
            heads[:, :, :dim],
            keys,
            values,
            a.cos,
            a.sin,
            rows,
            field("positions", n),
            field("at", n),
            queries,
            a.cache.k,
            a.cache.v,
            eps=self.plan.eps,
            q_weight=a.q_norm,
            k_weight=a.k_norm,
            norm_v=a.v_norm,
        )
        self._ops.decode_attention(
            queries,
            a.cache.k,
            a.cache.v,
            rows,
            field("first", n),
            field("end", n),
            b.scratch(a),
            out,
            scale=a.scaling,
            gate=heads[:, :, dim:] if a.gated else None,
        )
        return out

    def _delta(self, b: Buffers, n: int, a: Delta) -> Tensor:
        channels, values, heads = a.conv.shape[0], a.out.shape[1], a.value_heads
        projected, out = b.projected(a.projection.shape[0]), b.heads(values)
        torch.mm(b.x, a.projection.t(), out=projected)
        parts = projected[:, : channels + values + 2 * heads].split([channels, values, heads, heads], dim=1)
        qkv, z, strength, decay = parts
        self._ops.delta_step(
            qkv,
            z,
            decay,
            strength,
            b.descriptor.field("rows", n),
            a.state.conv,
            a.state.recurrent,
            a.conv,
            a.a_log,
            a.dt_bias,
            a.norm,
            b.mixed(channels),
            out,
            key_heads=a.key_heads,
            eps=a.norm_eps,
        )
        return out

    def _update(self, b: Buffers, n: int, source: Update | Embedding | None, *outs: Normed) -> None:
        self._ops.update_rows(self.residual, b.descriptor.field("rows", n), self.plan.eps, source, outs)
