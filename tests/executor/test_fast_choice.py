"""kernels=triton as an option: refused where it cannot be, declined for a system that needs more, and what it says."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("safetensors")

import json  # noqa: E402

from fast_world import CUDA  # noqa: E402
from runs_world import LIVE, quick, the_run, tiny_pack  # noqa: E402

from executor.__main__ import main  # noqa: E402
from executor.compose import settings_of  # noqa: E402
from executor.fast.choice import check_choice, why_declined  # noqa: E402
from executor.live_predictor import LivePredictor  # noqa: E402
from executor.pack import random_source  # noqa: E402
from executor.pack_writer import write_pack  # noqa: E402
from executor.settings import MachineSettings  # noqa: E402
from executor.store import ExpertStore  # noqa: E402
from policies.core.types import UserError  # noqa: E402

TRITON = ("kernels=triton", "torch_device=cuda")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_pack(tmp_path_factory.mktemp("tiny"))


def machine(pack, *more):
    (settings,) = settings_of(quick(pack, pack.parent, *more))
    return settings, MachineSettings.from_settings(settings)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["kernels=triton"], "kernels=triton needs torch_device=cuda, not cpu"),
        (["kernels=cuda"], "kernels=cuda: expected torch or triton"),
        (["graphs=false"], "graphs=false is for kernels=triton"),
        (["graphs=2", *TRITON], "graphs=2: expected true or false"),
    ],
)
def test_settings_that_cannot_be(tiny, tmp_path, capsys, given, said):
    assert main(quick(tiny, tmp_path, *given)) == 2
    assert capsys.readouterr().err.startswith(f"error: {said}")


def test_sizes_and_families_that_are_not_built(tiny, tmp_path):
    store = ExpertStore.open(tiny)
    settings, found = machine(tiny, *TRITON, "concurrency=17")
    with pytest.raises(UserError, match=r"at most 16 requests at a time, concurrency is 17"):
        check_choice(settings, found, store)
    small = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_experts": 8, "vocab_size": 32}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    write_pack(random_source("olmoe_1b_7b", 0, small), tmp_path / "olmoe", "bf16")
    settings, found = machine(tmp_path / "olmoe", *TRITON)
    with pytest.raises(UserError, match=r"not built for olmoe"):
        check_choice(settings, found, ExpertStore.open(tmp_path / "olmoe"))
    check_choice(*machine(tiny), store)  # kernels=torch: nothing to check


def test_what_a_system_needs_and_is_not_shown(tiny):
    _, found = machine(tiny, *TRITON, *LIVE)

    class Reads:
        columns = ("scores",)

    class Counts:
        columns = ()

    spec = ExpertStore.open(tiny).spec
    assert why_declined(found, None) is None
    assert why_declined(found, LivePredictor(Counts(), spec)) is None
    assert "scores" in why_declined(found, LivePredictor(Reads(), spec))
    assert "recorded" in why_declined(replace(found, record_trace="t.parquet"), None)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="EXECUTOR_TEST_DEVICE=cuda runs it")
def test_a_run_through_the_command(tmp_path):
    """Live, from files: two systems, with and without graphs, one and two in flight, decode the same tokens."""
    overrides = {"hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 3, "num_experts": 8,
                 "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 64}  # fmt: skip
    write_pack(random_source("demo", 3, overrides), tmp_path / "pack", "q4_0")
    tokens = []
    for number, more in enumerate(
        (
            ["system=llama_cpp_lfu"],
            ["system=bevy", "graphs=false"],
            ["system=bevy", "schedule.compute_slots=2"],
            ["system=bevy_prefetch"],
        )
    ):
        runs = tmp_path / str(number)
        assert main(quick(tmp_path / "pack", runs, *LIVE, *TRITON, *more)) == 0
        run = the_run(runs)
        lines = [json.loads(line) for line in (run / "completions.jsonl").read_text().splitlines()]
        tokens.append([line["tokens"] for line in lines])
        summary = json.loads((run / "summary.json").read_text())
        assert summary["kernels"]["name"] == "triton"
        assert (summary["kernels"]["graphs"] > 0) == ("graphs=false" not in more)
        assert summary["kernels"]["job_slots"] == (2 if "schedule.compute_slots=2" in more else 1)
    assert tokens[1:] == tokens[:1] * 3
