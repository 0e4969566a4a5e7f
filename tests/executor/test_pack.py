"""Writing packs: streamed, atomic, and honest about space and noise."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from packs import random_store, save_checkpoint
from safetensors.torch import load_file

from conf.models import ModelConfig
from executor.checkpoint import open_folder
from executor.errors import PackError
from executor.known_models import MODELS
from executor.naming import family_of, moe_shape
from executor.pack import main, random_source
from executor.pack_writer import write_pack
from executor.quant import dequantise_views
from executor.skeleton import complete_config
from executor.store import ExpertStore

TINY = [
    "config.hidden_size=64",
    "config.moe_intermediate_size=32",
    "config.num_experts=8",
    "config.num_attention_heads=2",
    "config.num_key_value_heads=1",
    "config.head_dim=8",
    "config.vocab_size=32",
]


def random_command(out: Path, *more: str) -> list[str]:
    return ["random=true", "model=demo", "layers=2", "dtype=bf16", f"out={out}", *TINY, *more]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pack") / "checkpoint"
    save_checkpoint(folder, "qwen3_moe")
    return folder


# ---------------------------------------------------------------- the command


def test_the_command(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"checkpoint={checkpoint}", f"out={tmp_path / 'a' / 'b'}", "dtype=q4_0"]) == 0
    store = ExpertStore.open(tmp_path / "a" / "b")
    assert (store.manifest.dtype, store.manifest.shared_dtype) == ("q4_0", "bf16")
    captured = capsys.readouterr()
    assert "4 x 16 experts of 3456 bytes (q4_0)" in captured.out
    assert "GB to write" in captured.err
    assert "RANDOM" not in captured.out


def test_the_same_command_writes_the_same_bytes(checkpoint: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert main([f"checkpoint={checkpoint}", f"out={tmp_path / name}", "dtype=q4_0"]) == 0
        assert main(random_command(tmp_path / f"{name}r")) == 0
    for name in ("", "r"):
        files = sorted(file.name for file in (tmp_path / f"a{name}").iterdir())
        for file in files:
            assert (tmp_path / f"a{name}" / file).read_bytes() == (tmp_path / f"b{name}" / file).read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["out=x"], "dtype= is missing"),
        (["out=x", "dtype=int8"], "dtype='int8' is unknown; use one of q4_0, bf16, f32"),
        (["out=x", "dtype=bf16"], "checkpoint=DIR|FILE.gguf is missing"),
        (["out=x", "dtype=bf16", "chekpoint=y"], "unknown key chekpoint; did you mean checkpoint?"),
        (["out=x", "dtype=bf16", "checkpoint=/nowhere"], "/nowhere/config.json is missing"),
        (["out=x", "dtype=bf16", "checkpoint=/nowhere.gguf"], "/nowhere.gguf is missing"),
        (["out=x", "dtype=bf16", "checkpoint=y", "layers=3"], "layers= is for random=true"),
        (["out=x", "dtype=bf16", "checkpoint=y", "shared_dtype=f8"], "y/config.json is missing"),
        (["out=x", "dtype=bf16", "out=y"], "out is given twice"),
        (["out=x", "verbose"], "verbose is not key=value"),
        (["out=x", "dtype=bf16", "random=yes"], "expected true or false"),
        (["out=x", "dtype=bf16", "random=true"], "random=true needs model=NAME"),
        (["out=x", "dtype=bf16", "random=true", "model=gpt5"], "model 'gpt5' is unknown; known: demo, "),
        (["out=x", "dtype=bf16", "random=true", "model=demo", "layers=0"], "layers is 0, expected a whole number"),
        (["out=x", "dtype=bf16", "random=true", "model=demo", "config.a={"], "config.a='{' is not a JSON value"),
        (["out=x", "dtype=q4_0", "random=true", "model=demo", "config.moe_intermediate_size=40"], "multiples of 32"),
    ],
)
def test_bad_arguments_are_one_line(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert len(error.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "qwen3_6_35b_a3b" in capsys.readouterr().out


def test_an_existing_directory_is_not_touched(checkpoint: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "out").mkdir()
    assert main([f"checkpoint={checkpoint}", f"out={tmp_path / 'out'}", "dtype=bf16"]) == 2
    assert "exists; remove it or choose another out=" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


# ---------------------------------------------------------------- failures while writing


class FailingWrite:
    """``os.write`` that fails after some bytes."""

    def __init__(self, after_bytes: int, error: BaseException) -> None:
        self.left, self.error = after_bytes, error

    def __call__(self, fd: int, data: memoryview) -> int:
        import os

        if self.left <= 0:
            raise self.error
        n = min(len(data), self.left, 1000)  # short writes too
        self.left -= n
        return os.write(fd, data[:n])


@pytest.mark.parametrize("after_bytes", [0, 5_000, 800_000])
@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), pytest.raises(PackError, match="the disk is full")),
        (OSError(errno.EIO, "Input/output error"), pytest.raises(PackError, match="Input/output error")),
        (KeyboardInterrupt(), pytest.raises(KeyboardInterrupt)),
    ],
)
def test_nothing_is_left_of_a_failed_pack(
    checkpoint: Path, tmp_path: Path, after_bytes: int, error: BaseException, raised: Any
) -> None:
    source = open_folder(checkpoint)
    with raised:
        write_pack(source, tmp_path / "out", "bf16", write=FailingWrite(after_bytes, error))
    source.close()
    assert not list(tmp_path.iterdir())


def test_short_writes_are_completed(checkpoint: Path, tmp_path: Path) -> None:
    source = open_folder(checkpoint)
    write_pack(source, tmp_path / "a", "f32")
    write_pack(source, tmp_path / "b", "f32", write=FailingWrite(1 << 40, OSError()))
    source.close()
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()


def test_too_little_space_is_said_before_a_byte_is_written(checkpoint: Path, tmp_path: Path, capsys: Any) -> None:
    source = open_folder(checkpoint)
    with pytest.raises(PackError, match=r"needs 0\.00 GB, but 0\.00 are free"):
        write_pack(source, tmp_path / "out", "bf16", free=lambda _: 1000)
    source.close()
    assert "GB to write, 0.00 GB free" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_interrupting_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from executor.random_weights import RandomSource

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RandomSource, "shared_rows", interrupt)
    assert main(random_command(tmp_path / "out")) == 130
    assert "error: interrupted; nothing was kept" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- memory


def memory_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def test_less_than_two_layers_are_in_memory(tmp_path: Path) -> None:
    """A sparse checkpoint of 4 layers of 25 MB, and an embedding of 67 MB."""
    experts, hidden, width, layers, vocabulary = 16, 512, 512, 4, 1 << 16
    folder = tmp_path / "c"
    config = {
        "model_type": "mixtral",
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_local_experts": experts,
        "num_experts_per_tok": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "vocab_size": vocabulary,
        "tie_word_embeddings": True,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    from executor.skeleton import shared_shapes

    family = family_of("mixtral")
    shapes: dict[str, tuple[int, ...]] = dict(shared_shapes(family, complete_config(family, config)))
    for layer in range(layers):
        shapes[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = (experts, 2 * width, hidden)
        shapes[f"model.layers.{layer}.mlp.experts.down_proj"] = (experts, hidden, width)
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + torch.Size(shape).numel() * 2
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    reset_peak = Path("/proc/self/clear_refs")
    source = open_folder(folder)
    source.shared_rows("model.norm.weight", 0, 1, torch.float32)  # first use of the libraries
    try:
        reset_peak.write_text("5")
    except OSError:
        pytest.skip("the kernel does not tell the peak memory")
    before = memory_bytes("VmRSS")
    write_pack(source, tmp_path / "p", "q4_0")
    growth = memory_bytes("VmHWM") - before
    source.close()
    layer_bytes = experts * 3 * hidden * width * 2
    assert growth < 2 * layer_bytes
    assert ExpertStore.open(tmp_path / "p").n_total == layers * experts


# ---------------------------------------------------------------- random weights


@pytest.mark.parametrize("dtype", ["q4_0", "bf16", "f32"])
def test_random_weights_are_finite_and_of_the_size_of_trained_ones(dtype: str, tmp_path: Path) -> None:
    store = random_store(tmp_path / "p", dtype)
    data = store.experts_path.read_bytes()
    seen = set()
    for expert in range(store.n_total):
        stride = torch.frombuffer(bytearray(data[store.offset(expert) :][: store.stride]), dtype=torch.uint8)
        for matrix in dequantise_views(store.views(stride), torch.float32):
            assert torch.isfinite(matrix).all()
            assert 0.008 < matrix.std() < 0.025
            assert abs(matrix.mean()) < 0.005
        seen.add(bytes(data[store.offset(expert) :][: store.stride]))
    assert len(seen) == store.n_total
    shared = load_file(store.shared_path)
    assert torch.all(shared["model.norm.weight"] == 1)
    assert 0.008 < shared["model.embed_tokens.weight"].float().std() < 0.025


def test_a_random_pack_says_so_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(random_command(tmp_path / "p", "seed=5")) == 0
    assert "RANDOM weights, for timing only" in capsys.readouterr().out
    manifest = ExpertStore.open(tmp_path / "p").manifest
    assert manifest.random
    assert manifest.name == "demo-random"
    assert manifest.source == {"kind": "random", "name": "demo", "seed": 5, "requantised": {}}


@pytest.mark.parametrize("family", ["qwen3_5_moe", "gemma4", "mixtral", "olmoe"])
def test_random_packs_of_every_family(family: str, tmp_path: Path) -> None:
    """Vectors have the initial values of the model's own classes."""
    from packs import wide_config

    from executor.random_weights import RandomSource

    config = wide_config(family)
    source = RandomSource("x", json.loads(config.to_json_string()), 0)
    write_pack(source, tmp_path / "p", "bf16", shared_dtype="f32")
    from transformers import AutoModelForCausalLM

    fresh = AutoModelForCausalLM.from_config(config).state_dict()
    for name, tensor in load_file(tmp_path / "p" / "shared.safetensors").items():
        assert tensor.shape == fresh[name].shape
        if tensor.ndim == 1 and not name.endswith("A_log"):
            assert torch.equal(tensor, fresh[name]), name
        elif name.endswith("A_log"):
            assert torch.all(tensor.exp() < 16.1)


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"demo"}))
def test_known_models_have_the_shapes_of_the_simulator(name: str) -> None:
    """Two independent tables: Hugging Face configs here, published shapes in conf/model."""
    yaml = pytest.importorskip("yaml")
    path = Path(__file__).parents[2] / "conf" / "model" / f"{name}.yaml"
    ours = ModelConfig.from_config(yaml.safe_load(path.read_text()))
    source = random_source(name)
    shape = moe_shape(source.family, source.config)
    assert shape.spec(name) == ours.spec
    assert shape.geometry("q4_0").expert_bytes == ours.expert_bytes
    assert sum(torch.Size(s).numel() for s in source.shared.values()) == pytest.approx(
        ours.parameters - ours.spec.n_total * ours.expert_parameters, rel=2e-3
    )


def test_the_demo_model() -> None:
    """24 x 32 experts of 360 pages: 1.13 GB in bf16."""
    geometry = random_source("demo").moe.geometry("bf16")
    assert geometry.expert_bytes == geometry.stride_bytes == 360 * 4096
