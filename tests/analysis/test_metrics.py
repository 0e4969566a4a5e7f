"""Summaries against numbers worked out by hand, and conservation on runs of the real core."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.account import Step, account
from analysis.metrics import STATES, step_frame, summarise
from policies.core.journal import read_journal
from policies.core.messages import Fetch
from policies.core.types import FetchKind, ModelSpec, UserError

MODEL = ModelSpec("toy", n_layers=2, n_experts=4, top_k=1)
MakeRun = Callable[..., Path]


def step(number: int, begin_s: float, *, both: float, link: float, gpu: float, neither: float, **more: object) -> Step:
    made = Step(number, (0, 1), begin_s, begin_s + both + link + gpu + neither, both, link, gpu, neither)
    made.needed = (0, 1, 4)
    made.jobs = 4
    made.group_sizes = Counter({1: 2, 2: 1})
    for name, value in more.items():
        setattr(made, name, value)
    return made


STEPS = [
    step(0, 0.0, both=1.0, link=1.0, gpu=1.0, neither=1.0, demand_fetches=3),  # warm-up: counts for nothing
    step(1, 4.0, both=2.0, link=1.0, gpu=0.5, neither=0.5, demand_fetches=1, token_gaps_s=[(0, 4.0), (1, 4.0)]),
    step(
        2, 8.0, both=1.0, link=3.0, gpu=1.5, neither=0.5,
        demand_fetches=1, prefetches=3, prefetches_needed=1, prefetches_late=1, prefetches_later_hit=1,
        repeated_fetches=1, group_sizes=Counter({2: 2}), token_gaps_s=[(0, 6.0), (1, 6.0)],
    ),
]  # fmt: skip


def summary() -> dict[str, object]:
    return summarise(STEPS, step_frame(STEPS, expert_bytes=10), MODEL, capacity=3, warmup=1)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokens_per_s", 4 / 10),
        ("step_s_mean", 5.0),
        ("step_s_p50", 5.0),
        ("step_s_p95", 4 + 0.95 * 2),
        ("step_s_p99", 4 + 0.99 * 2),
        ("inter_token_s_p50", 5.0),
        ("inter_token_s_p99", 6.0),
        ("tokens_per_step", 2.0),
        ("demand_fetches_per_step", 1.0),
        ("prefetches_per_step", 1.5),
        ("prefetches_needed_per_step", 0.5),
        ("prefetches_late_per_step", 0.5),
        ("prefetches_wasted_per_step", 1.0),
        ("prefetches_later_hit_per_step", 0.5),
        ("prefetch_on_time_share", 0.0),
        ("repeated_fetches_per_step", 0.5),
        ("bytes_per_step", 10 * (1 + 4) / 2),
        ("distinct_experts_per_step", 3.0),
        ("hit_rate", 1 - (1 + 2) / 6),
        ("busy_both", 0.3),
        ("link_only", 0.4),
        ("gpu_only", 0.2),
        ("neither", 0.1),
        ("gpu_busy_s_per_step", 2.5),
        ("link_busy_s_per_step", 3.5),
        ("link_bytes_per_s", 50 / 7),
        ("jobs_per_step", 4.0),
        ("groups_per_step", 2.5),
        ("group_size_share", {"1": 2 / 5, "2": 3 / 5}),
        ("rho", 7 / 5),
        ("warnings", []),
    ],
)
def test_every_key_of_the_summary(key: str, value: object) -> None:
    assert summary()[key] == pytest.approx(value)


def test_bounds() -> None:
    # Step 1: max(2.5 GPU, 3.0 link); step 2: max(2.5, 4.0).  Three experts in three slots: all hits after step 0.
    assert summary()["bounds"] == {
        "max_compute_fetch_s": 3.5,
        "step_over_bound": pytest.approx(5.0 / 3.5),
        "belady_fetches_per_step": 0.0,
        "belady_order": "lockstep",
    }


def test_the_optimum_of_a_loop_over_one_expert_too_many() -> None:
    """Two slots for the lookups (0, 1), (4) over and over."""
    steps = [step(n, n, both=1.0, link=0.0, gpu=0.0, neither=0.0) for n in range(5)]
    found = summarise(steps, step_frame(steps, 1), MODEL, capacity=2, warmup=1)["bounds"]
    # The lookup (0, 1) fills both slots, so expert 4 always evicts one of them: 2 misses a step.
    assert found["belady_fetches_per_step"] == 2.0


def test_an_optimum_that_cannot_hold_one_lookup_is_absent() -> None:
    found = summarise(STEPS, step_frame(STEPS, 1), MODEL, capacity=1, warmup=1)["bounds"]
    assert found["belady_fetches_per_step"] is None


def test_little_to_overlap_is_said() -> None:
    lockstep = [step(n, n, both=0.0, link=0.2, gpu=0.8, neither=0.0) for n in range(2)]
    (line,) = summarise(lockstep, step_frame(lockstep, 1), MODEL, 3, 0)["warnings"]
    assert "0.25, below 0.3" in line
    split = [step(n, n, both=0.0, link=0.2, gpu=0.8, neither=0.0, lockstep=False) for n in range(2)]
    (line,) = summarise(split, step_frame(split, 1), MODEL, 3, 0)["warnings"]
    assert "conventional-batching run" in line


def test_nothing_left_after_the_warm_up_is_refused() -> None:
    with pytest.raises(UserError, match="3 finished steps and warmup takes 3"):
        summarise(STEPS, step_frame(STEPS, 1), MODEL, 3, warmup=3)


def test_group_columns_reach_the_largest_group() -> None:
    frame = step_frame(STEPS, 10)
    assert frame["groups_of_1"].tolist() == [2, 2, 0]
    assert frame["groups_of_2"].tolist() == [1, 1, 2]
    assert frame["hit_rate"].tolist() == pytest.approx([0.0, 2 / 3, 1 / 3])


@pytest.mark.parametrize(("system", "prefetch"), [("llama_cpp", False), ("bevy", False), ("bevy", True)])
def test_conservation_on_runs_of_the_core(make_run: MakeRun, system: str, prefetch: bool) -> None:
    run = make_run(system, prefetch=prefetch, study=f"conservation-{prefetch}")
    steps = pd.read_parquet(run / "steps.parquet")
    summary = json.loads((run / "summary.json").read_text())
    states_s = steps[[f"{state}_s" for state in STATES]].sum(axis=1)
    np.testing.assert_allclose(states_s, steps["step_s"], rtol=1e-12)
    assert sum(summary[state] for state in STATES) == pytest.approx(1.0)
    assert (steps["jobs"] == 4 * 24).all()
    sizes = [int(name.removeprefix("groups_of_")) for name in steps if name.startswith("groups_of_")]
    assert (sum(steps[f"groups_of_{size}"] * size for size in sizes) == steps["jobs"]).all()
    _, records = read_journal(run / "journal.jsonl.gz")
    fetches = [c for record in records for c in record.commands if isinstance(c, Fetch)]
    demand = sum(fetch.kind is FetchKind.DEMAND for fetch in fetches)
    assert steps["demand_fetches"].sum() == demand
    assert steps["prefetches"].sum() == len(fetches) - demand
    assert (steps["prefetches_needed"] + steps["prefetches_wasted"] == steps["prefetches"]).all()
    assert (steps["prefetches_late"] <= steps["prefetches_needed"]).all()
    assert (steps["prefetches_later_hit"] <= steps["prefetches_wasted"]).all()
    assert (steps["step_s"] >= steps["bound_s"]).all()
    if prefetch:
        assert steps["prefetches_needed"].sum() > 0
        assert steps["prefetches_wasted"].sum() > 0
    if system == "llama_cpp":
        assert steps["groups_of_4"].sum() == steps["groups"].sum()
        assert summary["bounds"]["belady_order"] == "lockstep"
        assert summary["bounds"]["belady_fetches_per_step"] <= summary["demand_fetches_per_step"]


def test_distinct_experts_are_those_of_the_gates(make_run: MakeRun) -> None:
    """The account reads batches; the gates in the events say the same independently."""
    run = make_run("bevy")
    _, records = read_journal(run / "journal.jsonl.gz")
    asked: list[set[int]] = []
    for record in records:
        for event in record.events:
            if type(event).__name__ == "StepBegin":
                asked.append(set())
            for gate in getattr(event, "gates", ()):
                asked[-1].update(gate.experts)
    _, records = read_journal(run / "journal.jsonl.gz")
    assert [set(step.needed) for step in account(records)] == asked
