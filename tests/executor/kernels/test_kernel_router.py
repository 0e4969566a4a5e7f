"""The fused router: every family's mixing rule against float64, ties, padding, imposed experts and tagged ids."""

import pytest
import torch

pytest.importorskip("triton")

from kernel_world import DEVICE, integers, normal, relative

from executor.kernels import reference
from executor.kernels.router import route
from executor.kernels.values import TAG_BITS, MixRule

RULES = {
    "qwen3_6": (MixRule(True, torch.bfloat16), 256, False),
    "mixtral": (MixRule(True), 8, False),
    "olmoe": (MixRule(False, torch.bfloat16), 64, False),
    "gemma4": (MixRule(True), 128, True),
    "odd": (MixRule(True), 60, False),
}


def run(logits, rows, rule, n_experts, k, **extra):
    mix = torch.full((8, k), float("nan"), device=DEVICE)
    ids = torch.full((len(rows), k), -7, dtype=torch.int32, device=DEVICE)
    route(logits, rows, mix, ids, rule, n_experts=n_experts, **extra)
    return mix, ids


def exact(logits, rows, rule, n_experts, k, **extra):
    mix = torch.full((8, k), float("nan"), dtype=torch.float64, device=DEVICE)
    ids = torch.full((len(rows), k), -7, dtype=torch.int32, device=DEVICE)
    reference.route(logits, rows, mix, ids, rule, n_experts=n_experts, compute=torch.float64, **extra)
    return mix, ids


@pytest.mark.parametrize("family", RULES)
def test_chosen_experts_and_their_weights(family):
    rule, n_experts, scaled = RULES[family]
    k = 2 if family == "mixtral" else 8
    # columns beyond the experts belong to something else and are the largest
    logits = torch.cat([normal(3, n_experts, seed=1), torch.full((3, 4), 99.0, device=DEVICE)], 1).bfloat16()
    extra = {"expert_scale": normal(n_experts, seed=2)} if scaled else {}
    rows = integers([5, -1, 2])
    mix, ids = run(logits, rows, rule, n_experts, k, **extra)
    expected, expected_ids = exact(logits, rows, rule, n_experts, k, **extra)
    assert torch.equal(ids, expected_ids)
    assert (ids[1] == -7).all()
    # one unit in the last place of bf16: the interpreter's conversion cuts off instead of rounding
    assert relative(mix[[5, 2]], expected[[5, 2]]) < (1e-6 if rule.rounding is None else 2**-7)
    assert mix[[0, 1, 3, 4, 6, 7]].isnan().all()


def test_of_equal_logits_the_lower_expert_comes_first():
    logits = torch.zeros(1, 16, device=DEVICE)
    logits[0, [3, 9, 12]] = 1.0
    _, ids = run(logits, integers([0]), MixRule(True), 16, 5)
    assert ids[0].tolist() == [3, 9, 12, 0, 1]
    everywhere = torch.full((1, 16), float("-inf"), device=DEVICE)
    everywhere[0, 5] = 0.0
    _, ids = run(everywhere, integers([0]), MixRule(True), 16, 4)
    assert ids[0].tolist() == [5, 0, 1, 2]


def test_topk_of_the_plain_path_agrees_where_nothing_ties():
    logits = normal(4, 64, seed=3)
    _, ids = run(logits, integers([0, 1, 2, 3]), MixRule(True), 64, 8)
    assert torch.equal(ids.long(), logits.softmax(-1).topk(8, dim=-1).indices)


def test_ids_carry_the_sequence_number():
    logits = normal(2, 128, seed=4)
    rows = integers([0, 1])
    _, plain = run(logits, rows, MixRule(True), 128, 8)
    _, tagged = run(logits, rows, MixRule(True), 128, 8, sequence=integers([123_456]))
    assert torch.equal(tagged >> TAG_BITS, torch.full_like(plain, 123_456))
    assert torch.equal(tagged & ((1 << TAG_BITS) - 1), plain)


def test_imposed_experts_change_the_weights_and_not_the_reported_ids():
    logits = normal(2, 16, seed=5)
    rows, given = integers([0, 1]), integers([[7, 1, 9, 4], [-1, -1, -1, -1]])
    extra = {"expert_scale": normal(16, seed=6), "given": given}
    mix, ids = run(logits, rows, MixRule(True), 16, 4, **extra)
    expected, _ = exact(logits, rows, MixRule(True), 16, 4, **extra)
    assert relative(mix[:2], expected[:2]) < 1e-6
    assert torch.equal(ids.long(), logits.topk(4).indices)
    scores = logits[0].double().softmax(-1)[given[0].long()] / logits[0].double().softmax(-1)[given[0].long()].sum()
    assert relative(mix[0], scores * extra["expert_scale"][given[0].long()]) < 1e-6


@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_gate_of_nan_names_experts_that_exist():
    _, ids = run(torch.full((1, 12), float("nan"), device=DEVICE), integers([0]), MixRule(True), 12, 4)
    assert ((ids >= 0) & (ids < 12)).all()


def test_more_experts_than_a_tag_can_name_are_refused():
    with pytest.raises(ValueError, match="1025 experts"):
        run(torch.zeros(1, 1025, device=DEVICE), integers([0]), MixRule(True), 1025, 4)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
def test_ids_go_straight_into_pinned_memory():
    logits = normal(4, 256, seed=7)
    ids = torch.full((4, 8), -1, dtype=torch.int32).pin_memory()
    mix = torch.zeros(4, 8, device=DEVICE)
    route(logits, integers([0, 1, 2, 3]), mix, ids, MixRule(True), n_experts=256)
    torch.cuda.synchronize()
    assert torch.equal(ids.long(), logits.topk(8).indices.cpu())
