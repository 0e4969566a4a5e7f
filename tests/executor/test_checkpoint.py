"""Reading checkpoints: every parameter is used once, in its shape, or it is named."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("safetensors")

import torch
from packs import FAMILIES, edit_json, edit_tensors, model_experts, pack_of, save_checkpoint, wide_config
from safetensors.torch import load_file, save_file

from executor.checkpoint import open_folder
from executor.errors import PackError
from executor.pack import main
from executor.store import ExpertStore


def assert_same_weights(store: ExpertStore, model: Any, dtype: torch.dtype) -> None:
    """Every expert and every shared weight of the pack is the model's, cast once."""
    experts = store.experts_path.read_bytes()
    for layer, (gate_up, down) in enumerate(model_experts(model)):
        for index in range(store.spec.n_experts):
            offset = store.offset(store.spec.expert(layer, index))
            views = store.views(torch.frombuffer(bytearray(experts[offset : offset + store.stride]), dtype=torch.uint8))
            assert torch.equal(views["gate_up"], gate_up[index].to(dtype))
            assert torch.equal(views["down"], down[index].to(dtype))
    shared = load_file(store.shared_path)
    expected = {name: tensor for name, tensor in model.state_dict().items() if ".experts." not in name}
    if model.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    assert set(shared) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(shared[name], tensor.to(dtype)), name


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_of_every_family_arrives(family: str, stacked: bool, tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path / "c", family, stacked)
    store = pack_of(tmp_path / "c", tmp_path / "p", "bf16")
    assert store.manifest.family == family
    assert not store.manifest.random
    assert_same_weights(store, model, torch.bfloat16)
    assert (tmp_path / "p" / "generation_config.json").is_file()


@pytest.mark.parametrize(("source", "dtype"), [("float32", "f32"), ("float16", "f32"), ("float32", "bf16")])
def test_other_float_types(source: str, dtype: str, tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path / "c", "olmoe", dtype=source)
    store = pack_of(tmp_path / "c", tmp_path / "p", dtype)
    assert_same_weights(store, model, torch.float32 if dtype == "f32" else torch.bfloat16)


def test_dense_layers_have_no_experts(tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path / "c", "qwen3_moe", mlp_only_layers=[0, 2], intermediate_size=48)
    store = pack_of(tmp_path / "c", tmp_path / "p", "bf16")
    assert store.manifest.layers == (1, 3)
    assert store.spec.n_layers == 2
    assert_same_weights(store, model, torch.bfloat16)


def shard(folder: Path, names: list[str], index: bool) -> None:
    """Cut ``model.safetensors`` into files of these names, tensors dealt round."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    keys = sorted(tensors)
    weight_map: dict[str, str] = {}
    for i, name in enumerate(names):
        part = {key: tensors[key] for key in keys[i :: len(names)]}
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("index", [True, False])
def test_shards_are_found_with_and_without_an_index(index: bool, tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path / "c", "qwen3_moe")
    shard(tmp_path / "c", ["model-00001-of-00002.safetensors", "experts extra.safetensors", "zz.safetensors"], index)
    assert_same_weights(pack_of(tmp_path / "c", tmp_path / "p", "bf16"), model, torch.bfloat16)


def test_an_index_that_names_what_is_not_there(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", "qwen3_moe")
    shard(tmp_path / "c", ["a.safetensors", "b.safetensors"], index=True)
    index = tmp_path / "c" / "model.safetensors.index.json"
    edit_json(index, lambda values: values["weight_map"].update({"ghost.weight": "a.safetensors"}))
    with pytest.raises(PackError, match=r"ghost\.weight"):
        open_folder(tmp_path / "c")
    (tmp_path / "c" / "b.safetensors").unlink()
    with pytest.raises(PackError, match=r"b\.safetensors"):
        open_folder(tmp_path / "c")


def test_the_nested_form_of_multimodal_checkpoints(tmp_path: Path) -> None:
    """Text config under text_config, weights under model.language_model, towers beside it that are not used."""
    folder = tmp_path / "c"
    model = save_checkpoint(folder, "qwen3_5_moe", stacked=True)

    def nest(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            if name.startswith("model."):
                tensors["model.language_model." + name.removeprefix("model.")] = tensors.pop(name)
        tensors["model.visual.blocks.0.attn.qkv.weight"] = torch.zeros(2, 2)
        tensors["mtp.layers.0.mlp.experts.gate_up_proj"] = torch.zeros(2, 2, 2)

    edit_tensors(folder, nest)
    config = json.loads((folder / "config.json").read_text())
    tie = config.pop("tie_word_embeddings")
    outer = {"model_type": "qwen3_5_moe", "text_config": config, "vision_config": {}, "tie_word_embeddings": tie}
    (folder / "config.json").write_text(json.dumps(outer))
    store = pack_of(folder, tmp_path / "p", "bf16")
    assert_same_weights(store, model, torch.bfloat16)
    assert store.manifest.source["not_used"] == [
        "model.visual.blocks.0.attn.qkv.weight",
        "mtp.layers.0.mlp.experts.gate_up_proj",
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_missing_expert_is_named(family: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", family)
    names: list[str] = []

    def remove(tensors: dict[str, torch.Tensor]) -> None:
        names.append(next(name for name in sorted(tensors) if ".experts." in name and "layers.1." in name))
        del tensors[names[0]]

    edit_tensors(tmp_path / "c", remove)
    with pytest.raises(PackError, match=r"missing, first .*model\.layers\.1\..*experts\.0\.") as caught:
        open_folder(tmp_path / "c")
    assert "\n" not in str(caught.value)


def rename(old: str, new: str) -> Any:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


NORM = "model.layers.0.input_layernorm.weight"
EXPERT = "model.layers.0.mlp.experts.0.up_proj.weight"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (rename(EXPERT, EXPERT.replace("up", "upp")), r"missing, first .*experts\.0\.up_proj.*not known.*upp_proj"),
        (rename(NORM, "model.layers.0.norm9.weight"), r"missing, first .*input_layernorm.*not known.*norm9"),
        (lambda t: t.update({"surprise": torch.zeros(1)}), r"1 not known to this family, first 'surprise'"),
        (lambda t: t.update({EXPERT.replace("experts.0", "experts.99"): t[EXPERT].clone()}), r"experts\.99"),
        (lambda t: t.update({EXPERT.replace("layers.0", "layers.77"): t[EXPERT].clone()}), r"layers\.77"),
        (lambda t: t.update({EXPERT: t[EXPERT][:16].clone()}), r"experts\.0\.up_proj.*\(16, 64\).*\(32, 64\)"),
        (lambda t: t.update({NORM: t[NORM][:32].clone()}), r"input_layernorm.*\(32,\).*\(64,\)"),
        (lambda t: t.update({EXPERT: t[EXPERT].to(torch.int8)}), r"up_proj.*'I8'.*quantised"),
        (
            lambda t: t.update({"model.layers.0.mlp.experts.up_proj": torch.zeros(16, 32, 64)}),
            r"there twice: .*experts",
        ),
        (lambda t: t.update({"model.language_model.norm.weight": t["model.norm.weight"].clone()}), r"twice: .*norm"),
    ],
)
def test_a_wrong_parameter_is_named(edit: Any, message: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", "qwen3_moe")
    edit_tensors(tmp_path / "c", edit)
    with pytest.raises(PackError, match=message):
        open_folder(tmp_path / "c")


def test_the_same_tensor_in_two_shards(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", "qwen3_moe")
    save_file({NORM: torch.ones(64)}, tmp_path / "c" / "other.safetensors")
    with pytest.raises(PackError, match=r"input_layernorm.*model\.safetensors.*other\.safetensors"):
        open_folder(tmp_path / "c")


def edit_header(path: Path, edit: Any) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda h: h[EXPERT].update(shape=[32, 128]), r"up_proj.*needs 8192"),
        (lambda h: h[EXPERT].update(data_offsets=[0, 2048]), r"up_proj.*has 2048 bytes.*needs 4096"),
        (lambda h: h[EXPERT].update(data_offsets=[1 << 40, (1 << 40) + 4096]), r"up_proj.*ends at byte"),
        (lambda h: h[EXPERT].update(data_offsets=[0]), r"up_proj.*header entry"),
        (lambda h: h[EXPERT].update(shape=[-32, -64]), r"up_proj.*whole numbers"),
        (lambda h: h[EXPERT].update(dtype="F8_E4M3"), r"up_proj.*'F8_E4M3'"),
        (lambda h: h.update({EXPERT: 3}), r"up_proj.*header entry"),
    ],
)
def test_a_contradictory_header_is_named(edit: Any, message: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", "qwen3_moe")
    edit_header(tmp_path / "c" / "model.safetensors", edit)
    with pytest.raises(PackError, match=message):
        open_folder(tmp_path / "c")


def test_a_half_downloaded_shard(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", "qwen3_moe")
    path = tmp_path / "c" / "model.safetensors"
    data = path.read_bytes()
    for size in (len(data) // 2, 100, 3, 0):
        path.write_bytes(data[:size])
        with pytest.raises(PackError, match=r"model\.safetensors"):
            open_folder(tmp_path / "c")


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "something_new"])
@pytest.mark.parametrize("nested", [False, True])
def test_quantised_checkpoints_are_refused_by_method(method: str, nested: bool, tmp_path: Path) -> None:
    config = json.loads(wide_config("qwen3_5_moe").to_json_string())
    quantised = {"quantization_config": {"quant_method": method, "bits": 4}}
    values = (
        {"model_type": "qwen3_5_moe", "text_config": {**config, **quantised}} if nested else {**config, **quantised}
    )
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(PackError, match=method):
        open_folder(tmp_path)


def test_an_unknown_model_is_refused_before_transformers_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "dbrx"}')
    monkeypatch.setitem(sys.modules, "executor.skeleton", None)  # its import would fail
    assert main([f"checkpoint={tmp_path}", f"out={tmp_path / 'out'}", "dtype=bf16"]) == 2
    error = capsys.readouterr().err
    assert "error: model_type 'dbrx' is not supported; known: qwen3_moe, olmoe, mixtral, qwen3_5_moe" in error


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, r"config\.json is missing"), ("{", r"JSON"), ("[]", r"mapping"), ('{"model_type": null}', r"known: ")],
)
def test_a_broken_config(content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(PackError, match=message):
        open_folder(tmp_path)


def test_a_checkpoint_without_safetensors(tmp_path: Path) -> None:
    wide_config("olmoe").save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(PackError, match=r"no \*\.safetensors"):
        open_folder(tmp_path)


def test_gemma_without_experts(tmp_path: Path) -> None:
    wide_config("gemma4", enable_moe_block=False).save_pretrained(tmp_path)
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(PackError, match="no experts"):
        open_folder(tmp_path)
