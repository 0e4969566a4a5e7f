"""Q4_0: the split form against the gguf package, bit by bit."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("gguf")

import gguf
import numpy as np
import torch
from gguf import quants
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from executor.errors import PackError
from executor.geometry import ExpertGeometry
from executor.quant import (
    dequantise,
    dequantise_numpy,
    dequantise_views,
    encode_expert,
    join_blocks,
    quantise,
    split_blocks,
)
from executor.store import ExpertStore

Q4_0 = gguf.GGMLQuantizationType.Q4_0


def blocks_of(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Valid random Q4_0 blocks with extreme nibbles and scales of either sign, zero and subnormal."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows, columns // 32, 18), dtype=np.uint8)
    scales = rng.normal(0, 0.1, (rows, columns // 32)).astype(np.float16)
    scales.flat[:3] = (0.0, 6e-8, -60000.0)
    blocks[:, :, :2] = scales.view(np.uint8).reshape(rows, -1, 2)
    return blocks.reshape(rows, -1)


@settings(max_examples=50, deadline=None)
@given(npst.arrays(np.uint8, st.tuples(st.integers(1, 5), st.integers(1, 4).map(lambda n: 18 * n))))
def test_split_and_join_lose_nothing(blocks: np.ndarray) -> None:
    nibbles, scales = split_blocks(blocks)
    assert nibbles.shape == (blocks.shape[0], blocks.shape[1] // 18 * 16)
    np.testing.assert_array_equal(join_blocks(nibbles, scales), blocks)


def test_both_forms_dequantise_to_the_bits_of_the_gguf_package() -> None:
    blocks = blocks_of(7, 96)
    expected = quants.dequantize(blocks, Q4_0).view(np.uint32)
    nibbles, scales = split_blocks(blocks)
    np.testing.assert_array_equal(dequantise_numpy(nibbles, scales).view(np.uint32), expected)
    ours = dequantise(torch.from_numpy(nibbles), torch.from_numpy(scales))
    np.testing.assert_array_equal(ours.numpy().view(np.uint32), expected)


def test_nibble_order_of_a_row() -> None:
    """Word v of a row, read as int16, holds as nibble s weight 32 (v // 8) + 2 (v % 8) + s // 2 + 16 (s % 2)."""
    blocks = blocks_of(1, 64)
    nibbles, scales = split_blocks(blocks)
    codes = quants.dequantize(join_blocks(nibbles, np.ones_like(scales)), Q4_0)[0]
    words = nibbles.view("<u2")[0]
    for v, word in enumerate(words):
        for s in range(4):
            weight = 32 * (v // 8) + 2 * (v % 8) + s // 2 + 16 * (s % 2)
            assert (int(word) >> 4 * s) % 16 - 8 == codes[weight]


@pytest.mark.parametrize("dtype", ["q4_0", "bf16", "f32"])
def test_an_expert_of_floats_is_what_the_libraries_make_of_it(dtype: str) -> None:
    geometry = ExpertGeometry(dtype, hidden=64, intermediate=32)
    generator = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(32, 64, generator=generator) for _ in range(2))
    down = torch.randn(64, 32, generator=generator)
    out = np.empty(geometry.expert_bytes, dtype=np.uint8)
    encode_expert(geometry, gate, up, down, out)
    views = ExpertStore.views(_store(geometry), torch.from_numpy(out))
    got_gate_up, got_down = dequantise_views(views, torch.float32)
    for matrix, got in ((gate, got_gate_up[:32]), (up, got_gate_up[32:]), (down, got_down)):
        expected = {
            "q4_0": torch.from_numpy(quants.dequantize(quants.quantize(matrix.numpy(), Q4_0), Q4_0)),
            "bf16": matrix.bfloat16().float(),
            "f32": matrix,
        }[dtype]
        assert torch.equal(got, expected)


def test_gguf_blocks_become_an_expert_unchanged() -> None:
    geometry = ExpertGeometry("q4_0", hidden=64, intermediate=32)
    gate, up, down = blocks_of(32, 64, 1), blocks_of(32, 64, 2), blocks_of(64, 32, 3)
    out = np.empty(geometry.expert_bytes, dtype=np.uint8)
    encode_expert(geometry, *(torch.from_numpy(blocks) for blocks in (gate, up, down)), out)
    views = {k: v.numpy() for k, v in ExpertStore.views(_store(geometry), torch.from_numpy(out)).items()}
    gate_up = join_blocks(views["gate_up_nibbles"], views["gate_up_scales"])
    np.testing.assert_array_equal(gate_up, np.concatenate([gate, up]))
    np.testing.assert_array_equal(join_blocks(views["down_nibbles"], views["down_scales"]), down)


def test_published_sizes() -> None:
    """Qwen3.6: 1,769,472 bytes = 432 pages; Gemma 4: 3,345,408 bytes, not a whole number of pages."""
    qwen = ExpertGeometry("q4_0", 2048, 512)
    assert (qwen.expert_bytes, qwen.stride_bytes) == (1_769_472, 432 * 4096)
    gemma = ExpertGeometry("q4_0", 2816, 704)
    assert (gemma.expert_bytes, gemma.stride_bytes) == (3_345_408, 817 * 4096)
    assert ExpertGeometry("bf16", 2048, 512).expert_bytes == 6_291_456
    for geometry in (qwen, gemma):
        assert sum(part.n_bytes for part in geometry.parts) == geometry.expert_bytes
        assert all(part.offset % 16 == 0 for part in geometry.parts)


@pytest.mark.parametrize(("dtype", "hidden", "intermediate"), [("q4_0", 48, 32), ("q4_0", 32, 40), ("q8", 32, 32)])
def test_impossible_experts_are_refused(dtype: str, hidden: int, intermediate: int) -> None:
    with pytest.raises(PackError, match="q4_0"):
        ExpertGeometry(dtype, hidden, intermediate)


def test_quantise_is_the_gguf_package() -> None:
    weights = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    np.testing.assert_array_equal(quantise(weights), quants.quantize(weights, Q4_0))


def _store(geometry: ExpertGeometry) -> ExpertStore:
    store = ExpertStore.__new__(ExpertStore)
    store.geometry = geometry
    return store
