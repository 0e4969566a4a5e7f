"""The row rule on real widths: a row's bits do not depend on its place or its neighbours."""

import itertools

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tiny_models import DEVICE  # noqa: E402
from torch.nn import functional  # noqa: E402

from executor import rows  # noqa: E402
from executor.rows import RowRuleError, check_products, row_depends_on_neighbours, tile_rows, tiles  # noqa: E402


@pytest.fixture(autouse=True)
def _inference():
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield


def test_tiles_cut_and_fill():
    assert tiles([3, 1, 2], 4, 9) == [[3, 1, 2, 9]]
    assert tiles([0, 1, 2, 3, 4], 2, 9) == [[0, 1], [2, 3], [4, 9]]
    assert tiles([0, 1], 2, 9) == [[0, 1]]


def test_tile_heights():
    assert tile_rows(torch.device("cpu")) == 8
    assert tile_rows(torch.device("cuda")) == 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("width", [2048, 2880, 4608])
def test_every_subset_of_eight_rows_gives_equal_bits(dtype, width):
    generator = torch.Generator().manual_seed(width)
    weight = torch.randn(192, width, generator=generator).to(dtype)
    x = torch.zeros(9, width, dtype=dtype)
    x[:8] = torch.randn(8, width, generator=generator).to(dtype)
    right = functional.linear(x[:8], weight)
    subsets = [list(s) for n in range(1, 9) for s in itertools.combinations(range(8), n)]
    assert len(subsets) == 255
    for subset in subsets:
        (padded,) = tiles(subset, 8, 8)
        assert torch.equal(functional.linear(x[padded], weight)[: len(subset)], right[subset]), subset


def test_neighbours_content_does_not_matter():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(256, 2880, generator=generator)
    for scale in (0.0, 1.0, 1e30):
        x = scale * torch.randn(8, 2880, generator=generator)
        x[3] = torch.linspace(-1, 1, 2880)
        y = functional.linear(x, weight)[3]
        alone = torch.zeros(8, 2880)
        alone[0] = x[3]
        assert torch.equal(y, functional.linear(alone, weight)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_real_shapes_pass_on_this_machine(dtype):
    """[N, K] of expert and attention products of Qwen3.6 and Gemma 4."""
    shapes = [(1024, 2048), (2048, 512), (1408, 2816), (2816, 704), (4096, 2048), (256, 2048), (2048, 4608)]
    weights = [(str(s), torch.randn(s, device=DEVICE).to(dtype)) for s in shapes]
    assert check_products(weights, tile_rows(DEVICE)) == len(shapes)


def test_the_check_tests_each_shape_once():
    weights = [("a", torch.randn(16, 64)), ("b", torch.randn(16, 64)), ("c", torch.randn(16, 32))]
    assert check_products(weights, 8) == 2


def test_the_check_finds_a_product_that_breaks_the_rule(monkeypatch):
    """A product whose rows see the whole tile, as a kernel chosen by content or count would."""

    def leaky(x, weight):
        return torch.nn.functional.linear(x, weight) + 1e-7 * x.sum()

    class Leaky:
        linear = staticmethod(leaky)

    monkeypatch.setattr(rows, "functional", Leaky)
    weight = torch.randn(16, 64)
    assert row_depends_on_neighbours(weight, 8, torch.Generator().manual_seed(0))
    with pytest.raises(RowRuleError, match=r"q_proj \(16, 64\).*threads"):
        check_products([("q_proj", weight)], 8)
