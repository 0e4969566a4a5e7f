"""The row-wise kernels against plain torch; without a GPU under Triton's interpreter."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from tiny_models import DEVICE  # noqa: E402

from executor.fast import rowwise, rowwise_triton  # noqa: E402
from executor.fast.rowwise import Embedding, Normed, Update  # noqa: E402

HIDDEN, TILE, EPS = 96, 4, 1e-6  # a width that is no power of two
ROWS = [4, -1, 0]


def noise(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


SOURCES = {
    "nothing": None,
    "embedding": lambda: Embedding(
        noise(7, HIDDEN, dtype=torch.bfloat16, seed=1),
        torch.tensor([6, -1, 2], dtype=torch.int32, device=DEVICE),
        5.5,
    ),
    "attention": lambda: Update(dense=noise(TILE, HIDDEN, dtype=torch.bfloat16, seed=2)),
    "normed attention": lambda: Update(dense=noise(TILE, HIDDEN, seed=2), dense_norm=noise(HIDDEN, seed=3)),
    "routed": lambda: Update(routed=noise(TILE, HIDDEN, seed=4)),
    "gated": lambda: Update(
        routed=noise(TILE, HIDDEN, seed=4),
        dense=noise(TILE, HIDDEN, dtype=torch.bfloat16, seed=5),
        gate=noise(TILE, 33, dtype=torch.bfloat16, seed=6)[:, 32],
    ),
    "all norms": lambda: Update(
        routed=noise(TILE, HIDDEN, seed=4),
        routed_norm=noise(HIDDEN, seed=7),
        dense=noise(TILE, HIDDEN, seed=5),
        dense_norm=noise(HIDDEN, seed=8),
        merged_norm=noise(HIDDEN, seed=9),
        scale=0.75,
    ),
}


@pytest.mark.parametrize("outs", [0, 1, 2])
@pytest.mark.parametrize("source", SOURCES)
def test_update_rows(source, outs):
    given = SOURCES[source] and SOURCES[source]()
    rows = torch.tensor(ROWS, dtype=torch.int32, device=DEVICE)
    found = []
    for module in (rowwise, rowwise_triton):
        residual = noise(6, HIDDEN)
        targets = (
            Normed(torch.full((TILE, HIDDEN), 9.0, dtype=torch.float16, device=DEVICE), noise(HIDDEN, seed=10), True),
            Normed(torch.full((TILE, HIDDEN), 9.0, device=DEVICE), noise(HIDDEN, seed=11)),
        )[:outs]
        module.update_rows(residual, rows, EPS, given, targets)
        found.append((residual, *(target.out for target in targets)))
    for right, got in zip(*found, strict=True):
        torch.testing.assert_close(got, right, rtol=2e-3 if right.dtype is torch.float16 else 2e-6, atol=2e-6)
    residual = found[1][0]
    untouched = [row for row in range(6) if row not in ROWS]
    assert torch.equal(residual[untouched], noise(6, HIDDEN)[untouched])
    assert all((out[[1, 3]] == 9).all() for out in found[1][1:])  # padding, and what lies behind the group


def test_the_factors_of_a_norm_by_hand():
    """Closed form: a row of equal numbers has the norm of 1 each, and the update is what was asked for."""
    residual = torch.full((1, HIDDEN), 3.0, device=DEVICE)
    out, weight = torch.zeros(1, HIDDEN, device=DEVICE), torch.full((HIDDEN,), 2.0, device=DEVICE)
    update = Update(routed=torch.full((1, HIDDEN), 1.0, device=DEVICE), scale=0.5)
    for module in (rowwise, rowwise_triton):
        residual.fill_(3.0)
        module.update_rows(
            residual, torch.zeros(1, dtype=torch.int32, device=DEVICE), 0.0, update, (Normed(out, weight),)
        )
        assert torch.equal(residual, torch.full_like(residual, 2.0))
        torch.testing.assert_close(out, torch.full_like(out, 2.0))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gate_and_up(activation):
    gate_up = noise(TILE, 2 * 40 + 16, seed=12) * 3
    found = []
    for module in (rowwise, rowwise_triton):
        out = torch.full((TILE, 40), 9.0, device=DEVICE)
        module.gate_and_up(gate_up, 40, activation, out)
        found.append(out)
    torch.testing.assert_close(*found, rtol=2e-6, atol=2e-6)
