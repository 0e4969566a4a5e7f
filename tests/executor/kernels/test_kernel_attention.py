"""Decode attention and what stands before it: values against float64, windows, grouped heads, padding, bits."""

import pytest
import torch

pytest.importorskip("triton")

from kernel_world import DEVICE, integers, normal, poisoned, relative

from executor.kernels import reference
from executor.kernels.attention import decode_attention
from executor.kernels.rotary import rotate_and_store
from executor.kernels.values import attention_scratch

ROOM = 600  # three chunks, the last one cut short


def operands(heads, kv_heads, dim, n, seed, dtype=torch.float32):
    q = normal(n, heads, 2 * dim, seed=seed, dtype=dtype)
    caches = [normal(4, kv_heads, ROOM, dim, seed=seed + i, dtype=dtype) for i in (1, 2)]
    return q[..., :dim], q[..., dim:], *caches


def run(q, k, v, rows, first, end, gate=None):
    heads, dim = q.shape[1:]
    scratch = attention_scratch(len(rows), heads, k.shape[2], dim, DEVICE)
    out = torch.full((len(rows), heads * dim), float("nan"), dtype=q.dtype, device=DEVICE)
    poisoned(*scratch)
    decode_attention(q, k, v, rows, first, end, scratch, out, scale=dim**-0.5, gate=gate)
    return out


def exact(q, k, v, rows, first, end, gate=None):
    heads, dim = q.shape[1:]
    out = torch.zeros(len(rows), heads * dim, dtype=torch.float64, device=DEVICE)
    extra = {"scale": dim**-0.5, "gate": gate, "compute": torch.float64}
    reference.decode_attention(q, k, v, rows, first, end, attention_scratch(0, 1, 1, 1, "cpu"), out, **extra)
    return out


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "gated"), [(4, 2, 16, True), (3, 1, 16, False), (2, 2, 32, False)]
)
def test_values_at_every_length(heads, kv_heads, dim, gated):
    q, gate, k, v = operands(heads, kv_heads, dim, 4, seed=1)
    rows, first, end = integers([2, -1, 0, 3]), integers([0, 0, 0, 0]), integers([1, 0, 256, 600])
    k[2, :, 1:] = v[2, :, 1:] = float("nan")  # what lies beyond a length is never used
    out = run(q, k, v, rows, first, end, gate if gated else None)
    real = [0, 2, 3]
    assert relative(out[real], exact(q, k, v, rows, first, end, gate if gated else None)[real]) < 2e-6
    assert out[1].isnan().all()


def test_a_window_hides_what_lies_before_it():
    q, _, k, v = operands(2, 1, 16, 3, seed=2)
    rows, first, end = integers([0, 1, 2]), integers([250, 256, 599]), integers([300, 600, 600])
    k[0, :, :250] = v[0, :, :250] = float("nan")
    out = run(q, k, v, rows, first, end)
    assert relative(out, exact(q, k, v, rows, first, end)) < 2e-6


def test_large_scores_do_not_overflow():
    q, _, k, v = operands(2, 1, 16, 1, seed=3)
    rows, first, end = integers([0]), integers([0]), integers([400])
    assert relative(run(q * 300, k, v, rows, first, end), exact(q * 300, k, v, rows, first, end)) < 1e-4


def test_bits_of_a_row_do_not_depend_on_its_group():
    q, _, k, v = operands(2, 1, 16, 3, seed=4, dtype=torch.bfloat16)
    rows, first, end = integers([1, 2, 0]), integers([0, 0, 0]), integers([300, 12, 520])
    out = run(q, k, v, rows, first, end)
    for t in range(3):
        one = [x[t : t + 1] for x in (q, rows, first, end)]
        assert torch.equal(run(one[0], k, v, *one[1:])[0], out[t])


@pytest.mark.parametrize("rot", [16, 8])
@pytest.mark.parametrize("normed", [True, False])
def test_rotation_and_the_new_place_in_the_cache(rot, normed):
    heads, kv_heads, dim, n = 3, 2, 16, 3
    projection = normal(n, (2 * heads + 2 * kv_heads) * dim, seed=5)
    q = projection[:, : 2 * heads * dim].view(n, heads, 2 * dim)[..., :dim]
    k, v = projection[:, 2 * heads * dim :].view(n, 2, kv_heads, dim).unbind(1)
    angle = normal(50, rot // 2, seed=6).repeat(1, 2)
    cos, sin = angle.cos(), angle.sin()
    rows, positions, at = integers([1, -1, 0]), integers([49, 0, 7]), integers([0, 3, 9])
    weights = {"q_weight": normal(dim, seed=7), "k_weight": normal(dim, seed=8), "norm_v": True} if normed else {}

    def outcome(function, dtype, **extra):
        caches = [torch.full((2, kv_heads, 10, dim), float("nan"), dtype=dtype, device=DEVICE) for _ in range(2)]
        turned = torch.full((n, heads, dim), float("nan"), dtype=dtype, device=DEVICE)
        function(q, k, v, cos, sin, rows, positions, at, turned, *caches, eps=1e-6, **weights, **extra)
        return turned, *caches

    got = outcome(rotate_and_store, torch.float32)
    expected = outcome(reference.rotate_and_store, torch.float64, compute=torch.float64)
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert relative(ours.nan_to_num(), theirs.nan_to_num()) < 1e-6


def test_the_reference_turns_as_transformers_does():
    modeling = pytest.importorskip("transformers.models.qwen3_5_moe.modeling_qwen3_5_moe")
    q, k = normal(1, 2, 16, seed=9).cpu(), normal(1, 1, 16, seed=10).cpu()
    angle = normal(1, 4, seed=11).repeat(1, 2).cpu()
    expected_q, expected_k = modeling.apply_rotary_pos_emb(
        q[:, :, None], k[:, :, None], angle.cos()[None], angle.sin()[None]
    )
    turned, k_cache, v_cache = torch.zeros(1, 2, 16), torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, 1, 16)
    zero = torch.zeros(1, dtype=torch.int32)
    reference.rotate_and_store(q, k, k, angle.cos(), angle.sin(), zero, zero, zero, turned, k_cache, v_cache, eps=1e-6)
    torch.testing.assert_close(turned, expected_q[:, :, 0])
    torch.testing.assert_close(k_cache[:, :, 0], expected_k[:, :, 0])


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(16, 2, 256), (16, 2, 512), (16, 8, 256), (32, 4, 128)])
def test_real_heads_in_bf16(heads, kv_heads, dim):
    q = normal(8, heads, dim, seed=12, dtype=torch.bfloat16)
    k, v = (normal(8, kv_heads, 4096, dim, seed=s, dtype=torch.bfloat16) for s in (13, 14))
    rows, first = integers(list(range(8))), integers([0] * 7 + [1000])
    end = integers([1, 64, 255, 256, 257, 2000, 4096, 2024])
    out = run(q, k, v, rows, first, end)
    assert relative(out, exact(q, k, v, rows, first, end)) < 4e-3
    alone = run(q[5:], k, v, rows[5:6], first[5:6], end[5:6])
    assert torch.equal(alone[0], out[5])
