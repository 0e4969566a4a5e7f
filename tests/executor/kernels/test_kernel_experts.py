"""Experts from a slot arena: values against float64, bits of a row, padding, and offsets beyond 2^31 bytes."""

import pytest
import torch

pytest.importorskip("triton")

from kernel_world import (
    DEVICE,
    Group,
    integers,
    normal,
    poisoned,
    poisoned_scratch,
    random_arena,
    random_group,
    relative,
)

from executor.geometry import ExpertGeometry
from executor.kernels import reference
from executor.kernels.experts import experts
from executor.kernels.experts_q4 import Q4Tuning, q4_experts
from executor.kernels.planes import to_planes
from executor.kernels.values import ExpertsShape, plane_order

TOLERANCE = {"f32": 1e-6, "bf16": 1e-6, "q4_0": 1e-3}
SHAPES = {
    # sizes that no row or column step divides, then ones that the steps divide
    ("f32", "silu"): (72, 20),
    ("bf16", "gelu_tanh"): (80, 24),
    ("q4_0", "silu"): (320, 96),
    ("q4_0", "gelu_tanh"): (256, 256),
}


def shape_of(kind, top_k):
    dtype, activation = kind
    return ExpertsShape(ExpertGeometry(dtype, *SHAPES[kind]), top_k, activation)


def run(shape, arena, group):
    out = torch.full((len(group.rows), shape.geometry.hidden), float("nan"), device=DEVICE)
    experts(shape, group.x, arena, group.slots, group.rows, group.mix, poisoned_scratch(shape, len(group.rows)), out)
    return out


def exact(shape, arena, group):
    out = torch.zeros(len(group.rows), shape.geometry.hidden, dtype=torch.float64, device=DEVICE)
    none = shape.scratch(0, "cpu")
    reference.experts(shape, group.x, arena, group.slots, group.rows, group.mix, none, out, compute=torch.float64)
    return out


@pytest.mark.parametrize("kind", SHAPES, ids="-".join)
def test_values_with_shared_experts_and_padding(kind):
    shape = shape_of(kind, top_k=2)
    arena = random_arena(shape.geometry, 4, seed=1)
    group = random_group(shape, [[3, 0], [-1, -1], [0, 2]], [1, -1, 0], seed=2)
    out = run(shape, arena, group)
    expected = exact(shape, arena, group)
    assert relative(out[[0, 2]], expected[[0, 2]]) < TOLERANCE[kind[0]]
    assert out[1].isnan().all()  # padding is not touched


@pytest.mark.parametrize("kind", [("bf16", "gelu_tanh"), ("q4_0", "silu")], ids="-".join)
def test_a_pair_without_a_slot_counts_nothing(kind):
    shape = shape_of(kind, top_k=2)
    arena = random_arena(shape.geometry, 2, seed=3)
    group = random_group(shape, [[-1, 1]], [0], seed=4)
    assert relative(run(shape, arena, group), exact(shape, arena, group)) < TOLERANCE[kind[0]]


def test_more_pairs_than_one_group_holds_share_an_expert():
    shape = shape_of(("q4_0", "silu"), top_k=1)
    arena = random_arena(shape.geometry, 2, seed=5)
    slots = [[1]] * 10 + [[0]] + [[1]] * 5
    group = random_group(shape, slots, list(range(16)), seed=6)
    assert relative(run(shape, arena, group), exact(shape, arena, group)) < 1e-3


@pytest.mark.parametrize("kind", [("bf16", "gelu_tanh"), ("q4_0", "silu")], ids="-".join)
def test_bits_of_a_row_do_not_depend_on_its_group(kind):
    shape = shape_of(kind, top_k=2)
    arena = random_arena(shape.geometry, 4, seed=7)
    together = random_group(shape, [[3, 0], [3, 1], [0, 3], [2, 3]], [0, 1, 2, 3], seed=8)
    out = run(shape, arena, together)
    for token in (0, 2):
        alone = Group(
            together.x[token:], together.slots[token : token + 1], together.rows[token : token + 1], together.mix
        )
        assert torch.equal(run(shape, arena, alone)[0], out[token])
    moved = Group(*(t.flip(0).contiguous() for t in together[:3]), together.mix)
    assert torch.equal(run(shape, arena, moved).flip(0), out)


def test_tuning_does_not_show_in_the_bits():
    shape = shape_of(("q4_0", "silu"), top_k=2)
    arena = random_arena(shape.geometry, 3, seed=9)
    group = random_group(shape, [[2, 0], [0, 1]], [0, 1], seed=10)
    expected = run(shape, arena, group)
    for tuning in (Q4Tuning(32, 2, 2, 64, 3, 8, 2, False, 128), Q4Tuning(down_rows=32, down_warps=2, down_eager=True)):
        out = torch.full_like(expected, float("nan"))
        q4_experts(shape, group.x, arena, *group[1:], poisoned_scratch(shape, 2), out, tuning=tuning)
        assert torch.equal(out, expected)


def test_more_tokens_than_a_group_are_refused():
    shape = shape_of(("q4_0", "silu"), top_k=1)
    group = random_group(shape, [[0]] * 17, list(range(17)), seed=17)
    with pytest.raises(ValueError, match="17 tokens"):
        run(shape, random_arena(shape.geometry, 1, seed=18), group)


def test_an_input_beyond_fp16_stays_a_number():
    x = torch.tensor([[1e9, -1e9] + [1.0] * 30], device=DEVICE)
    planes = torch.zeros(1, 32, dtype=torch.float16, device=DEVICE)
    to_planes(x, planes)
    assert planes.isfinite().all()
    assert set(planes[0].tolist()) == {65504.0, -65504.0, 1.0}


def test_planes_meet_the_nibbles_of_the_pack():
    x = normal(2, 64, seed=11, dtype=torch.bfloat16)
    planes = torch.zeros(2, 64, dtype=torch.float16, device=DEVICE)
    poisoned(planes)
    to_planes(x, planes)
    expected = torch.zeros_like(planes)
    reference.to_planes(x, expected)
    assert torch.equal(planes, expected)
    # Word v, nibble s as read off a packed row whose weight w has the code w % 16.
    codes = torch.arange(32) % 16
    byte = codes[:16] | codes[16:] << 4
    words = byte.to(torch.uint8).view(torch.int16)
    nibbles = torch.stack([(words.int() >> 4 * s) & 15 for s in range(4)]).reshape(-1)
    assert torch.equal(nibbles, codes[plane_order(32)].int())


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["bf16", "q4_0"])
@pytest.mark.parametrize("model", ["qwen3_6", "gemma4"])
def test_real_shapes_at_offsets_beyond_two_gigabytes(dtype, model):
    hidden, intermediate, activation = {"qwen3_6": (2048, 512, "silu"), "gemma4": (2816, 704, "gelu_tanh")}[model]
    shape = ExpertsShape(ExpertGeometry(dtype, hidden, intermediate), 8, activation)
    stride = shape.stride_bytes
    # Elements are counted in int16 or bf16: twice 2^31 bytes is where their number passes 2^31.
    last = (1 << 32) // stride + 2
    few = random_arena(shape.geometry, 12, seed=12).view(12, stride)
    arena = torch.empty((last + 1) * stride, dtype=torch.uint8, device=DEVICE)
    places = [*range(6), *range(last - 5, last + 1)]
    arena.view(-1, stride)[torch.tensor(places, device=DEVICE)] = few
    generator = torch.Generator().manual_seed(13)
    for n in (1, 8, 16):
        chosen = [torch.randperm(12, generator=generator)[:8].tolist() for _ in range(n)]
        group = random_group(shape, [[places[i] for i in row] for row in chosen], list(range(n)), seed=14)
        out = run(shape, arena, group)
        small = group._replace(slots=integers(chosen))
        assert relative(out, exact(shape, few.reshape(-1), small)) < TOLERANCE[dtype]
        alone = Group(group.x[n - 1 :], group.slots[n - 1 :], group.rows[n - 1 :], group.mix)
        assert torch.equal(run(shape, arena, alone)[0], out[n - 1])
