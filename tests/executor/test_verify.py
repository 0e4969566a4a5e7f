"""Verification finds every flipped byte."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from packs import random_store

from executor.store import ExpertStore
from executor.verify import main


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ExpertStore:
    return random_store(tmp_path_factory.mktemp("verify") / "pack", "q4_0")


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


def test_an_intact_pack(store: ExpertStore, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(store.path)]) == 0
    assert capsys.readouterr().out == f"{store.path}: 16 experts and all random weights are intact\n"


@pytest.mark.parametrize(
    ("name", "offset", "message"),
    [
        ("experts.bin", 0, "1 of 16 experts are damaged, first 0:0 at offset 0"),
        ("experts.bin", 11 * 4096 + 4095, "1 of 16 experts are damaged, first 1:3 at offset 45056"),
        ("shared.safetensors", 5000, "shared.safetensors is damaged"),
        ("experts.crc", 3, "experts.crc is damaged"),
    ],
)
def test_a_flipped_byte(
    store: ExpertStore, name: str, offset: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert store.stride == 4096
    flip(store.path / name, offset)
    try:
        assert main([str(store.path)]) == 2
    finally:
        flip(store.path / name, offset)
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert main([]) == 2
    assert main(["/nowhere"]) == 2
    assert "not an expert pack" in capsys.readouterr().err
