"""Job times: the affine form, its scaling by bytes, and a measured table."""

import pytest
from sim_world import A, B, C, K, device, load, tiny

from conf.devices import DeviceConfig
from conf.job_times import Curve, roofline
from conf.models import ModelConfig
from policies.core.types import Phase


def step_s(times, n_layers, n, experts, tokens):
    """One step in one group of n requests."""
    requests = n * times.request_s(tokens)
    jobs = sum(times.seconds(Phase.JOB, layer, n, experts, requests) for layer in range(n_layers))
    entry = times.seconds(Phase.ENTRY, -1, n, 0, requests)
    return entry + jobs + times.seconds(Phase.HEAD, n_layers, n, 0, requests)


@pytest.mark.parametrize("n", [1, 3, 8])
def test_a_step_in_one_group(n):
    model = tiny(n_layers=5)
    assert step_s(device(model).times, 5, n, 6, 0) == pytest.approx(5 * (A + 6 * B + n * C) + K)


def test_context_makes_requests_dearer():
    model = tiny(n_layers=5)
    dev = device(model, token_s=0.001)
    assert step_s(dev.times, 5, 2, 6, 1000) == pytest.approx(5 * (A + 6 * B + 2 * (C + 1.0)) + K)


def test_scaling_by_bytes_gives_the_published_estimate_for_qwen3_6_on_an_m6():
    """a = 0.19, b = 0.025, c = 0.022 + 0.0035 per 1k tokens, K = 2.9 ms, with 37 us and 49% for the experts."""
    model = ModelConfig.from_config(load("model/qwen3_6_35b_a3b"))
    times = roofline(
        model,
        memory_bytes_per_s=170e9,
        dense_efficiency=0.86,
        expert_efficiency=0.49,
        launch_s=37e-6,
        request_launch_s=0,
    )
    assert times.layer_s * 1e3 == pytest.approx(0.19, abs=0.005)
    assert times.expert_s * 1e3 == pytest.approx(0.025, abs=0.0005)
    assert times.request_s(0) * 1e3 == pytest.approx(0.022, abs=0.0005)
    assert (times.request_s(1000) - times.request_s(0)) * 1e3 == pytest.approx(0.0035, abs=0.00005)
    assert times.head_s * 1e3 == pytest.approx(2.9, abs=0.06)


@pytest.mark.parametrize("name", ["qwen3_30b_a3b", "deepseek_v2_lite", "glm_4_5_air"])
def test_a_roofline_step_reads_every_byte_once(name):
    model = ModelConfig.from_config(load(f"model/{name}"))
    times = roofline(
        model, memory_bytes_per_s=1e9, dense_efficiency=0.5, expert_efficiency=0.5, launch_s=0.0, request_launch_s=0.0
    )
    n, experts, tokens = 4, 11, 3000
    dense = (model.body_bytes + model.head_bytes + n * model.state_bytes(tokens)) / 0.5e9
    moe = model.n_layers * experts * model.expert_bytes / 0.25e9
    assert step_s(times, model.n_layers, n, experts, tokens) == pytest.approx(dense + moe)


def test_a_curve_is_linear_between_and_beyond_its_points():
    curve = Curve([(1, 10.0), (3, 20.0), (4, 50.0)])
    assert [curve(x) for x in (1, 2, 3, 3.5, 4, 5, 0)] == [10, 15, 20, 35, 50, 80, 5]
    assert curve.covers(1)
    assert curve.covers(4)
    assert not curve.covers(4.5)
    assert Curve([(2, 7.0)])(9) == 7.0


@pytest.mark.parametrize(("quantisation", "measured"), [("q4_0", (87, 91, 101, 130)), ("bf16", (80, 98, 122, 181))])
def test_the_h200_table_gives_the_measured_jobs(quantisation, measured):
    """Groups of 1, 2, 4 and 8 at 4k tokens, uniform top-8 routing: 8, 15.8, 30 and 57 distinct experts."""
    model = ModelConfig.from_config(load("model/qwen3_6_35b_a3b") | {"quantisation": quantisation})
    times = DeviceConfig.from_config(load("device/h200_ram"), model).times
    for n, experts, us in zip((1, 2, 4, 8), (8, 15.8, 30, 57), measured, strict=True):
        got = times.seconds(Phase.JOB, 3, n, experts, n * times.request_s(4096))
        assert got * 1e6 == pytest.approx(us, abs=0.01)
    assert not times.extrapolated


def test_the_h200_table_at_other_contexts():
    """Eight requests with bf16 experts: 165 us at 1k, 197 us at 8k tokens."""
    model = ModelConfig.from_config(load("model/qwen3_6_35b_a3b") | {"quantisation": "bf16"})
    times = DeviceConfig.from_config(load("device/h200_ram"), model).times
    for tokens, us in ((1024, 165), (8192, 197)):
        assert times.seconds(Phase.JOB, 3, 8, 57, 8 * times.request_s(tokens)) * 1e6 == pytest.approx(us, rel=0.04)


def test_a_step_by_table_has_the_parts_of_a_step():
    model = ModelConfig.from_config(load("model/qwen3_6_35b_a3b"))
    times = DeviceConfig.from_config(load("device/h200_ram"), model).times
    assert step_s(times, 40, 8, 57, 4096) == pytest.approx(40 * 130e-6 + 0.2e-3)


def test_asking_beyond_the_table_is_noticed():
    model = ModelConfig.from_config(load("model/qwen3_6_35b_a3b"))
    dev = DeviceConfig.from_config(load("device/h200_ram"), model)
    assert dev.warnings() == []
    inside = dev.times.seconds(Phase.JOB, 3, 8, 57, 0.0)
    assert dev.times.seconds(Phase.JOB, 3, 16, 102, 0.0) > inside
    assert dev.times.extrapolated
    assert "extrapolated" in dev.warnings()[0]
