"""Experts of a group: values against a plain sum, and bits against every grouping."""

import itertools

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional  # noqa: E402

from executor.experts import ExpertWeights, add_experts, expert_mlp, users_of_experts  # noqa: E402

H, WIDTH, E, K = 48, 20, 6, 2


@pytest.fixture(autouse=True)
def _inference():
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield


def world(rows, dtype=torch.float32, h=H, i=WIDTH, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2 * i, h), (h, i)]
    experts = [ExpertWeights(*(torch.randn(s, generator=generator).to(dtype) for s in shapes)) for _ in range(E)]
    x = torch.zeros(rows + 1, h, dtype=dtype)
    x[:rows] = torch.randn(rows, h, generator=generator).to(dtype)
    chosen = [torch.randperm(E, generator=generator)[:K].tolist() for _ in range(rows)]
    mix = torch.zeros(rows + 1, E)
    for row, numbers in enumerate(chosen):
        mix[row, numbers] = torch.rand(K, generator=generator)
    return experts, x, chosen, mix


def run(world, rows):
    experts, x, chosen, mix = world
    out = torch.zeros(x.shape[0], x.shape[1])
    users = users_of_experts(rows, [chosen[r] for r in rows])
    add_experts(out, x, mix, users, weights_of=experts.__getitem__, activation=functional.silu, tile=8)
    return out


def test_users_are_in_ascending_order():
    assert list(users_of_experts([4, 2], [[5, 1], [1, 0]]).items()) == [(0, [2]), (1, [4, 2]), (5, [4])]


def test_one_expert_in_closed_form():
    """One weight of one: relu(g) * u, then doubled."""
    weights = ExpertWeights(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[2.0], [0.0]]))
    y = expert_mlp(torch.tensor([[3.0, 5.0], [-3.0, 5.0]]), weights, torch.relu)
    assert y.tolist() == [[30.0, 0.0], [0.0, 0.0]]


def test_weighted_sum_equals_the_plain_one():
    experts, x, chosen, mix = world(11)  # more rows than a tile
    out = run((experts, x, chosen, mix), list(range(11)))
    for row in range(11):
        exact = {e: ExpertWeights(*(w.double() for w in experts[e])) for e in chosen[row]}
        right = sum(mix[row, e].double() * expert_mlp(x[row].double(), w, functional.silu) for e, w in exact.items())
        torch.testing.assert_close(out[row].double(), right, rtol=1e-5, atol=1e-4)
    assert not out[11].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_groupings_do_not_show_in_the_bits(dtype):
    rows = 8
    experts, x, chosen, mix = world(rows, dtype, h=2048, i=128)
    right = run((experts, x, chosen, mix), list(range(rows)))
    for n in (1, 2, 3, 5, 7):
        for group in itertools.islice(itertools.combinations(range(rows), n), 0, None, 5):
            out = run((experts, x, chosen, mix), list(group))
            assert torch.equal(out[list(group)], right[list(group)]), group
    assert torch.equal(run((experts, x, chosen, mix), [7, 3, 5, 1, 0, 2, 6, 4])[:rows], right[:rows])


def test_all_rows_on_one_expert_and_none_on_the_others():
    experts, x, _, _ = world(9)
    mix = torch.zeros(10, E)
    mix[:9, 3] = 1.0
    asked = []

    def weights_of(number):
        asked.append(number)
        return experts[number]

    out = torch.zeros(10, H)
    add_experts(
        out, x, mix, users_of_experts(range(9), [[3]] * 9), weights_of=weights_of, activation=functional.silu, tile=8
    )
    assert asked == [3]
    torch.testing.assert_close(out[:9], expert_mlp(x[:9], experts[3], functional.silu), rtol=1e-5, atol=1e-5)


def test_an_expert_that_is_not_there_is_an_error():
    experts, x, chosen, mix = world(1)
    out = torch.zeros(2, H)
    table = {chosen[0][0]: experts[0]}
    with pytest.raises(KeyError):
        add_experts(
            out, x, mix, users_of_experts([0], chosen), weights_of=table.__getitem__, activation=functional.silu, tile=8
        )
