"""RMS norms and the DeltaNet step: values against float64 and transformers, padding, states by row, bits of a row."""

import pytest
import torch

pytest.importorskip("triton")

from kernel_world import DEVICE, integers, normal, relative

from executor.kernels import reference
from executor.kernels.delta import delta_step
from executor.kernels.norm import rms_norm


@pytest.mark.parametrize("outs", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_with_what_came_before_added(outs, dtype):
    x, add = normal(4, 96, seed=1, dtype=dtype), normal(3, 96, seed=2)
    rows = integers([3, -1, 0])
    weights = [normal(96, seed=3), None, normal(96, seed=4)][:outs]

    def outcome(function, state, out_dtype, **extra):
        results = [torch.full((3, 96), float("nan"), dtype=out_dtype, device=DEVICE) for _ in range(outs)]
        planes = torch.full((3, 96), float("nan"), dtype=torch.float16, device=DEVICE)
        function(state, rows, weights, results, eps=1e-6, add=add, planes=planes, **extra)
        return state, planes, *results

    state, planes, *results = outcome(rms_norm, x.clone(), dtype)
    wide, _, *expected = outcome(reference.rms_norm, x.double(), torch.float64, compute=torch.float64)
    tolerance = 1e-6 if dtype == torch.float32 else 6e-3
    assert relative(state, wide) < tolerance
    assert torch.equal(state[1:3], x[1:3])
    for got, want in zip(results, expected, strict=True):
        assert relative(got[[0, 2]], want[[0, 2]]) < tolerance
        assert got[1].isnan().all()
    same = torch.zeros_like(planes)
    reference.to_planes(results[0], same)
    assert torch.equal(planes[[0, 2]], same[[0, 2]])


def test_a_norm_alone_leaves_its_input():
    x, rows = normal(2, 40, seed=5), integers([1])
    kept, out = x.clone(), torch.zeros(1, 40, device=DEVICE)
    rms_norm(x, rows, [None], [out], eps=0.0)
    assert torch.equal(x, kept)
    assert float(out.pow(2).mean()) == pytest.approx(1.0, abs=1e-5)


KEY_HEADS, HEADS, KEY, VALUE, TAPS = 2, 4, 16, 32, 4
CHANNELS = 2 * KEY_HEADS * KEY + HEADS * VALUE


def delta_operands(n, seed, dtype=torch.float32):
    projected = normal(n, CHANNELS + HEADS * VALUE + 2 * HEADS, seed=seed, dtype=dtype)
    parts = projected.split([CHANNELS, HEADS * VALUE, HEADS, HEADS], dim=1)
    states = normal(4, CHANNELS, TAPS - 1, seed=seed + 1, dtype=dtype), normal(3, HEADS, KEY, VALUE, seed=seed + 2)
    weights = (
        normal(CHANNELS, TAPS, seed=seed + 3, dtype=dtype),
        normal(HEADS, seed=seed + 4),
        normal(HEADS, seed=seed + 5),
        normal(VALUE, seed=seed + 6),
    )
    return parts, states, weights


def step(function, parts, rows, states, weights, dtype, **extra):
    mixed = torch.full((len(rows), CHANNELS), float("nan"), device=DEVICE)
    out = torch.full((len(rows), HEADS * VALUE), float("nan"), dtype=dtype, device=DEVICE)
    function(*parts, rows, *states, *weights, mixed, out, key_heads=KEY_HEADS, eps=1e-6, **extra)
    return out


def test_a_delta_step_advances_the_states_of_its_rows():
    parts, states, weights = delta_operands(3, seed=6)
    rows = integers([2, -1, 0])
    ours, theirs = [s.clone() for s in states], [s.double() for s in states]
    out = step(delta_step, parts, rows, ours, weights, torch.float32)
    expected = step(reference.delta_step, parts, rows, theirs, weights, torch.float64, compute=torch.float64)
    assert relative(out[[0, 2]], expected[[0, 2]]) < 1e-5
    assert out[1].isnan().all()
    for got, want, before in zip(ours, theirs, states, strict=True):
        assert relative(got, want) < 1e-6
        assert torch.equal(got[1], before[1])
        assert not torch.equal(got[2], before[2])


def test_bits_of_a_delta_step_do_not_depend_on_its_group():
    parts, states, weights = delta_operands(3, seed=7, dtype=torch.bfloat16)
    ours = [s.clone() for s in states]
    out = step(delta_step, parts, integers([1, 0, 2]), ours, weights, torch.bfloat16)
    single = [s.clone() for s in states]
    alone = step(delta_step, [p[2:] for p in parts], integers([2]), single, weights, torch.bfloat16)
    assert torch.equal(alone[0], out[2])
    assert all(torch.equal(a[2], b[2]) for a, b in zip(single, ours, strict=True))


def test_the_reference_steps_as_transformers_does():
    modeling = pytest.importorskip("transformers.models.qwen3_5_moe.modeling_qwen3_5_moe")
    from transformers import Qwen3_5MoeTextConfig

    config = Qwen3_5MoeTextConfig(
        hidden_size=32,
        linear_num_key_heads=KEY_HEADS,
        linear_num_value_heads=HEADS,
        linear_key_head_dim=KEY,
        linear_value_head_dim=VALUE,
        linear_conv_kernel_dim=TAPS,
    )
    torch.manual_seed(8)
    net = modeling.Qwen3_5MoeGatedDeltaNet(config, 0).eval().requires_grad_(False)
    for weight in net.parameters():
        weight.copy_(torch.randn_like(weight) * weight.shape[-1] ** -0.5)
    tokens = torch.randn(1, 6, 32)
    expected = net(tokens)
    conv, recurrent = torch.zeros(1, CHANNELS, TAPS - 1), torch.zeros(1, HEADS, KEY, VALUE)
    for t in range(6):
        x, out = tokens[0, t : t + 1], torch.zeros(1, HEADS * VALUE)
        reference.delta_step(
            net.in_proj_qkv(x), net.in_proj_z(x), net.in_proj_a(x), net.in_proj_b(x),
            torch.zeros(1, dtype=torch.int32), conv, recurrent, net.conv1d.weight[:, 0],
            net.A_log, net.dt_bias, net.norm.weight, torch.empty(0), out, key_heads=KEY_HEADS, eps=config.rms_norm_eps,
        )  # fmt: skip
        torch.testing.assert_close(net.out_proj(out), expected[:, t], rtol=1e-4, atol=1e-5)
