"""Greedy and seeded sampling."""

import pytest

torch = pytest.importorskip("torch")

from executor.sampling import Greedy, Seeded  # noqa: E402
from policies.core.types import UserError  # noqa: E402


def test_greedy_takes_the_first_of_equals():
    assert Greedy().choose([5, 6], torch.tensor([[1.0, 3.0, 3.0], [0.0, -1.0, -2.0]])) == [1, 0]


def test_draws_follow_the_distribution():
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    sampler = Seeded(seed=7)
    drawn = [sampler.choose([0], logits)[0] for _ in range(4000)]
    shares = [drawn.count(t) / 4000 for t in range(3)]
    assert shares == pytest.approx([0.5, 0.3, 0.2], abs=0.03)  # four standard deviations


def test_a_draw_does_not_depend_on_company_or_order():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    together, alone = Seeded(seed=1), Seeded(seed=1)
    a = [together.choose([4, 8, 2], logits) for _ in range(5)]
    b = {r: [alone.choose([r], logits[i : i + 1])[0] for _ in range(5)] for i, r in ((2, 2), (0, 4), (1, 8))}
    assert [list(step) for step in zip(b[4], b[8], b[2], strict=True)] == a


def test_top_k_and_top_p_keep_the_likeliest():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    drawn = [Seeded(top_k=2, seed=s).choose([0], logits)[0] for s in range(200)]
    assert set(drawn) == {0, 1}
    drawn = [Seeded(top_p=0.75, seed=s).choose([0], logits)[0] for s in range(300)]
    assert set(drawn) == {0, 1, 2}  # 0.4 + 0.3 do not hold 0.75; the third does
    assert {Seeded(top_p=0.01, seed=s).choose([0], logits)[0] for s in range(50)} == {0}


def test_low_temperature_is_greedy():
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(1))
    assert {Seeded(temperature=1e-3, seed=s).choose([0], logits)[0] for s in range(20)} == {int(logits.argmax())}


@pytest.mark.parametrize(
    "bad", [{"temperature": 0.0}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}]
)
def test_values_that_mean_nothing_are_refused(bad):
    with pytest.raises(UserError, match="expected"):
        Seeded(**bad)
