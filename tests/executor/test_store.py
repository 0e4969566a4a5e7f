"""The pack's manifest and views: what is accepted, and that nothing else is."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packs import edit_json, expert_tensor, random_store

from executor.errors import PackError
from executor.store import ExpertStore, Manifest


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ExpertStore:
    return random_store(tmp_path_factory.mktemp("store") / "pack")


@pytest.fixture
def pack(store: ExpertStore, tmp_path: Path) -> Path:
    """A copy that may be broken."""
    copy = tmp_path / "pack"
    copy.mkdir()
    for file in store.path.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def test_what_an_opened_pack_says(store: ExpertStore) -> None:
    assert store.expert_bytes == 3 * 64 * 32 * 2
    assert store.stride % 4096 == 0
    assert store.stride - store.expert_bytes < 4096
    assert (store.spec.n_layers, store.spec.n_experts, store.spec.top_k) == (2, 8, 4)
    assert store.manifest.random
    assert store.manifest.source["kind"] == "random"
    assert "random" in store.spec.name
    assert store.experts_path.stat().st_size == 16 * store.stride
    assert store.label(11) == "1:3"
    assert store.offset(11) == 11 * store.stride
    for expert in range(store.n_total):
        assert zlib.crc32(expert_tensor(store, expert).numpy().tobytes()) == store.checksum(expert)


@pytest.mark.parametrize("expert", [-1, 16])
def test_an_expert_outside_is_an_error(store: ExpertStore, expert: int) -> None:
    with pytest.raises(IndexError):
        store.offset(expert)


def test_views_share_the_buffer(store: ExpertStore) -> None:
    buffer = torch.zeros(store.stride, dtype=torch.uint8)
    views = store.views(buffer)
    assert {name: tuple(view.shape) for name, view in views.items()} == {"gate_up": (64, 64), "down": (64, 32)}
    buffer[: store.expert_bytes] = torch.frombuffer(bytearray(struct.pack("<H", 0x3F80)), dtype=torch.uint8).repeat(
        store.expert_bytes // 2
    )
    assert torch.all(views["gate_up"] == 1)
    assert torch.all(views["down"] == 1)


def test_q4_views(tmp_path: Path) -> None:
    store = random_store(tmp_path / "pack", "q4_0")
    shapes = {name: (tuple(v.shape), v.dtype) for name, v in store.views(expert_tensor(store, 0)).items()}
    assert shapes == {
        "gate_up_nibbles": ((64, 32), torch.uint8),
        "down_nibbles": ((64, 16), torch.uint8),
        "gate_up_scales": ((64, 2), torch.float16),
        "down_scales": ((64, 1), torch.float16),
    }


@pytest.mark.parametrize(
    ("name", "message"),
    [("experts.bin", "experts.bin"), ("experts.crc", "experts.crc"), ("shared.safetensors", "shared.safetensors")],
)
def test_a_cut_or_missing_file_is_named(pack: Path, name: str, message: str) -> None:
    data = (pack / name).read_bytes()
    (pack / name).write_bytes(data[:-1])
    with pytest.raises(PackError, match=message):
        ExpertStore.open(pack)
    (pack / name).unlink()
    with pytest.raises(PackError, match=message):
        ExpertStore.open(pack)


def test_a_damaged_checksum_table_is_refused(pack: Path) -> None:
    table = bytearray((pack / "experts.crc").read_bytes())
    table[5] ^= 1
    (pack / "experts.crc").write_bytes(table)
    with pytest.raises(PackError, match=r"experts.crc is damaged"):
        ExpertStore.open(pack)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("version", 2, "version"),
        ("format", "gguf", "format"),
        ("n_experts", 9, "n_experts"),
        ("stride_bytes", 4096, "stride_bytes"),
        ("expert_bytes", 1 << 62, "expert_bytes"),
        ("experts_file_bytes", -1, "experts_file_bytes"),
        ("layers", [0], "layers"),
        ("layers", [0, "1"], "layers"),
        ("dtype", "int3", "int3"),
        ("shared_dtype", "f8", "f8"),
        ("family", "mixtral", "family"),
        ("random", 1, "random"),
        ("hidden_size", True, "hidden_size"),
        ("config", {"model_type": "llama"}, "llama"),
        ("config", {}, "model_type"),
        ("crc32", {}, "experts.crc"),
        ("crc32", {"../../etc/passwd": 1}, "passwd"),
        ("extra", 1, "extra"),
    ],
)
def test_a_wrong_field_is_named(pack: Path, key: str, value: Any, message: str) -> None:
    edit_json(pack / "manifest.json", lambda values: values.update({key: value}))
    with pytest.raises(PackError, match=message) as caught:
        ExpertStore.open(pack)
    assert "\n" not in str(caught.value)


def test_no_pack_at_all(tmp_path: Path) -> None:
    with pytest.raises(PackError, match=r"not an expert pack: manifest\.json"):
        ExpertStore.open(tmp_path / "nowhere")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_fuzzed_field_gives_a_manifest_or_one_line(store: ExpertStore, data: st.DataObject) -> None:
    values = json.loads(store.manifest.to_json())
    target = data.draw(st.sampled_from([values, values["config"], values["crc32"]]))
    key = data.draw(st.sampled_from(sorted(target)))
    target[key] = data.draw(json_values)
    _manifest_or_one_line(json.dumps(values))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_fuzzed_bytes_give_a_manifest_or_one_line(store: ExpertStore, data: st.DataObject) -> None:
    text = store.manifest.to_json()
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 40)))
    _manifest_or_one_line(text[:start] + data.draw(st.text(max_size=20)) + text[end:])


@pytest.mark.parametrize("text", ["[" * 200_000, "1" * 10_000, "\x00", "", "null", '{"format": 1}'])
def test_hostile_manifests(text: str) -> None:
    _manifest_or_one_line(text)


def _manifest_or_one_line(text: str) -> None:
    message, manifest = "one line", None
    try:
        manifest = Manifest.from_json(text)
    except PackError as error:
        message = str(error)
    assert len(message.splitlines()) == 1
    assert len(message) < 400
    if manifest is not None:
        assert manifest.experts_file_bytes == manifest.stride_bytes * len(manifest.layers) * manifest.n_experts
