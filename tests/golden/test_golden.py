"""Golden journals: a change of decisions changes ``journals.json`` in the diff, a refactor does not.

Each system of ``conf/system`` (and two static groupings) decides 20 steps of a small model.  The world
completes commands in a seeded order and no time is involved, so the digests hold on every machine.
To write them anew after a change that is meant: ``python tests/golden/test_golden.py``.
"""

import gzip
import hashlib
import json
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).with_name("journals.json")
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "core")]

from worlds import AnyOrder, Routes, Steps  # noqa: E402

from conf.compose import composing, expand  # noqa: E402
from policies.build import build_core  # noqa: E402
from policies.core.driver import drive  # noqa: E402
from policies.core.journal import Journal  # noqa: E402
from policies.core.types import ModelSpec  # noqa: E402

SYSTEMS = sorted([*(path.stem for path in (ROOT / "conf" / "system").glob("*.yaml")), "static_4_4", "static_2_2_2_1_1"])
MODEL = ModelSpec("golden", n_layers=5, n_experts=16, top_k=3)
SMALL = ["model.n_layers=5", "model.n_experts=16", "model.top_k=3", "cache.fraction=0.4", "concurrency=8"]


def digest(system: str, folder: Path) -> str:
    with composing() as more:
        (point,) = expand([*more, f"system={system}", *SMALL])
    core = build_core(point.config, MODEL, fetch_slots=4)
    with Journal(folder / "journal", {}) as journal:
        world = AnyOrder(Routes(MODEL, seed=2, predict=True), seed=3)
        drive(core, Steps(20, range(8)), world, journal=journal, check=True)
    return hashlib.sha256(gzip.decompress((folder / "journal").read_bytes())).hexdigest()


@pytest.mark.parametrize("system", SYSTEMS)
def test_decisions_are_what_they_were(system, tmp_path):
    assert json.loads(GOLDEN.read_text())[system] == digest(system, tmp_path)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        GOLDEN.write_text(json.dumps({name: digest(name, Path(folder)) for name in SYSTEMS}, indent=1) + "\n")
