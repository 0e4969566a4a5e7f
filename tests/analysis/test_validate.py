"""A simulated run against one on a machine: equal decisions, differing ones, and times by hand."""

import gzip
import json
import shutil

import numpy as np
import pytest
from omegaconf import OmegaConf

from analysis.__main__ import main
from analysis.metrics import write_metrics
from analysis.validate import check_replay, compare_runs, table
from policies.core.types import UserError

MACHINE = {"backend": "executor", "link": "paced 1.00 GB/s", "valid": True}


@pytest.fixture
def pair(make_run):
    return make_run("bevy"), make_run("bevy", study="machine", **MACHINE)


def edited(run, folder, edit, **config):
    """A copy of a run with ``edit`` applied to each line of its journal but the first."""
    shutil.copytree(run, folder)
    path = folder / "journal.jsonl.gz"
    header, *lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    rows = [edit(i, json.loads(line)) for i, line in enumerate(lines)]
    path.write_bytes(gzip.compress("\n".join([header, *map(json.dumps, rows)]).encode() + b"\n"))
    settings = OmegaConf.load(folder / "config.yaml")
    write_metrics(folder, OmegaConf.to_container(settings))
    OmegaConf.save(OmegaConf.merge(settings, config), folder / "config.yaml")
    return folder


def test_equal_journals_are_equal_in_everything(pair, capsys, tmp_path):
    found = compare_runs(*pair)
    assert found.decisions_equal
    assert found.counts_equal
    assert found.mean_error == 0
    assert len(found.errors) == 5  # eight steps of which three warm up
    assert found.counts["hits"].min() >= 0
    assert main(["validate", *map(str, pair), f"out={tmp_path / 'v.png'}"]) == 0
    out = capsys.readouterr().out
    assert "decisions: equal in all" in out
    assert "paced 1.00 GB/s; valid" in out
    assert (tmp_path / "v.png").stat().st_size > 1000


def test_a_machine_twice_as_slow_is_predicted_at_half(pair, tmp_path):
    slow = edited(pair[1], tmp_path / "slow", lambda i, row: [2 * row[0], *row[1:]])
    found = compare_runs(pair[0], slow)
    assert found.decisions_equal
    assert found.mean_error == pytest.approx(-0.5)
    assert np.allclose(found.errors, -0.5)
    assert "-50.0%" in table(found)


def test_a_differing_command_is_found_and_a_replay_must_have_none(pair, tmp_path, capsys):
    def other_slot(i, row):
        for command in row[2]:
            if i == 200 and command[0] == "F":
                command[3] += 1
        return row

    lines = gzip.decompress((pair[1] / "journal.jsonl.gz").read_bytes()).decode().splitlines()[1:]
    assert any(command[0] == "F" for command in json.loads(lines[200])[2])
    changed = edited(pair[1], tmp_path / "changed", other_slot, journal="sim/journal.jsonl.gz")
    found = compare_runs(pair[0], changed)
    assert found.same_records == 200
    assert found.records == len(lines)
    assert found.first_difference is not None
    assert found.counts_equal
    assert "first difference in step" in table(found)
    with pytest.raises(UserError, match="replayed a journal and differs"):
        check_replay(found)
    assert main(["validate", str(pair[0]), str(changed), f"out={tmp_path / 'v.png'}"]) == 2
    assert "replayed a journal and differs" in capsys.readouterr().err


def test_two_systems_differ_in_their_counts(pair, make_run):
    found = compare_runs(pair[0], make_run("llama_cpp", study="machine", **MACHINE))
    assert not found.decisions_equal
    assert not found.counts_equal
    check_replay(found)  # it was no replay


def test_what_cannot_be_compared_is_refused(pair, make_run):
    with pytest.raises(UserError, match="is a run of sim, expected executor"):
        compare_runs(pair[0], pair[0])
    with pytest.raises(UserError, match="8 steps in common and 9 are warm-up"):
        compare_runs(pair[0], make_run("bevy", study="warm", **{**MACHINE, "warmup": 9}))
    assert main(["validate", str(pair[0])]) == 2
