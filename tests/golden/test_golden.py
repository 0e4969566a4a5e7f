"""Golden decisions: a change of decisions changes ``decisions.json`` in the diff, a refactor does not.

Each system of ``conf/system`` (and two static groupings) decides 20 steps of a small model.  The world
completes commands in a seeded order and no time is involved, so the digests hold on every machine.
To write them anew after a change that is meant: ``python tests/golden/test_golden.py``.
"""

import dataclasses
import hashlib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).with_name("decisions.json")
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "core")]

from worlds import AnyOrder, Routes, Steps  # noqa: E402

from conf.compose import composing, expand  # noqa: E402
from policies.build import build_core  # noqa: E402
from policies.core.driver import drive  # noqa: E402
from policies.core.types import ModelSpec  # noqa: E402

SYSTEMS = sorted([*(path.stem for path in (ROOT / "conf" / "system").glob("*.yaml")), "static_4_4", "static_2_2_2_1_1"])
MODEL = ModelSpec("golden", n_layers=5, n_experts=16, top_k=3)
SMALL = ["model.n_layers=5", "model.n_experts=16", "model.top_k=3", "cache.fraction=0.4", "concurrency=8"]


class Decisions:
    """Takes a journal's place: a digest of every event and command, whatever the journal's form."""

    def __init__(self):
        self.digest = hashlib.sha256()

    def record(self, t_s, events, commands):
        for value in [*events, *commands]:
            self.digest.update(f"{type(value).__name__}{dataclasses.astuple(value)}".encode())


def digest(system: str) -> str:
    with composing() as more:
        (point,) = expand([*more, f"system={system}", *SMALL])
    host = {"fetch_s": 2.0, "expert_s": 2.0, "move_s": 1.0, "token_share": 0.3}
    core = build_core(point.config, MODEL, fetch_slots=4, host_times=host)
    decisions = Decisions()
    drive(
        core, Steps(20, range(8)), AnyOrder(Routes(MODEL, seed=2, predict=True), seed=3), journal=decisions, check=True
    )
    return decisions.digest.hexdigest()


@pytest.mark.parametrize("system", SYSTEMS)
def test_decisions_are_what_they_were(system):
    assert json.loads(GOLDEN.read_text())[system] == digest(system)


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({name: digest(name) for name in SYSTEMS}, indent=1) + "\n")
