"""Device profiles: all load for all models, every constant is marked, bad ones are refused."""

import pytest
from omegaconf import OmegaConf
from sim_world import CONF, load

from conf.devices import SOURCES, DeviceConfig
from conf.job_times import Affine, Table
from conf.models import ModelConfig
from policies.core.types import UserError

DEVICES = sorted(path.stem for path in (CONF / "device").glob("*.yaml"))
MODELS = sorted(path.stem for path in (CONF / "model").glob("*.yaml"))
GEMMA4 = ModelConfig.from_config(load("model/gemma4_26b_a4b"))
QWEN3_6 = ModelConfig.from_config(load("model/qwen3_6_35b_a3b"))


def test_the_devices():
    assert DEVICES == ["cpu_disk", "h200_disk", "h200_ram", "m6", "rtx4090", "thor"]


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("model", MODELS)
def test_every_device_serves_every_model(name, model):
    config = ModelConfig.from_config(load(f"model/{model}"))
    dev = DeviceConfig.from_config(OmegaConf.create(load(f"device/{name}")), config)
    described = dev.describe()
    assert described["name"] == name
    assert "link.bytes_per_s" in described["sources"]
    assert set(described["sources"].values()) <= set(SOURCES)
    assert dev.fetch_slots == 8


def marked(node, path=""):
    """All numbers of a profile and whether they stand in a marked node."""
    if isinstance(node, dict) and "value" in node:
        yield path, set(node) == {"value", "source", "note"} and node["source"] in SOURCES and bool(node["note"])
    elif isinstance(node, dict):
        for key, part in node.items():
            yield from marked(part, f"{path}.{key}")
    elif not isinstance(node, str):
        yield path, False


@pytest.mark.parametrize("name", DEVICES)
def test_every_number_says_where_it_comes_from(name):
    numbers = list(marked(load(f"device/{name}")))
    assert numbers
    assert [path for path, ok in numbers if not ok] == []


def test_a_fit_is_for_its_model_and_quantisation_only():
    m6 = load("device/m6")
    fitted = DeviceConfig.from_config(m6, GEMMA4)
    assert isinstance(fitted.times, Affine)
    assert fitted.describe()["job_times"].startswith("affine gemma4_q4_0")
    assert "gpu.fits.gemma4_q4_0.a_s" in fitted.sources
    for other in (QWEN3_6, ModelConfig.from_config(load("model/gemma4_26b_a4b") | {"quantisation": "bf16"})):
        scaled = DeviceConfig.from_config(m6, other)
        assert scaled.describe()["job_times"].startswith("roofline")
        assert "gpu.fits.gemma4_q4_0.a_s" not in scaled.sources
    assert isinstance(DeviceConfig.from_config(load("device/h200_disk"), QWEN3_6).times, Table)


def test_the_roofline_of_the_m6_agrees_with_the_fit_it_was_scaled_from():
    m6 = load("device/m6")
    fitted = DeviceConfig.from_config(m6, GEMMA4).times
    del m6["gpu"]["fits"]
    scaled = DeviceConfig.from_config(m6, GEMMA4).times
    assert scaled.layer_s == pytest.approx(fitted.layer_s, rel=0.01)
    assert scaled.expert_s == pytest.approx(fitted.expert_s, rel=0.02)
    assert scaled.head_s == pytest.approx(fitted.head_s, rel=0.2)
    for tokens in (1000, 7000):
        assert scaled.request_s(tokens) == pytest.approx(
            fitted.request_s(tokens), rel=0.15
        )  # one constant for two contexts


def test_the_m6_reads_an_expert_in_half_a_millisecond():
    """121.7 ms of busy link for 235 experts (paper, figures 10 and 12) lie between many readers and one, near many.

    One reader gets that share of the rate which one gets of other Apple SSDs (conf/device/m6.yaml names them).
    """
    link = DeviceConfig.from_config(load("device/m6"), GEMMA4).link
    many = GEMMA4.expert_bytes / link.bytes_per_s
    assert many < 121.7e-3 / 235 < many + 0.1 * link.latency_s
    for rate, size, alone in ((3.35e9, 2**20, 2.2e9), (14.5e9, 3 * 2**20, 8.2e9), (14.1e9, 9.3 * 2**20, 11.1e9)):
        assert size / (link.latency_s + size / rate) == pytest.approx(alone, rel=0.03)


@pytest.mark.parametrize(("size", "rate"), [(0.5e6, 42.8e9), (1.769472e6, 50.3e9), (3.5e6, 52.7e9), (16e6, 54.7e9)])
def test_copies_to_an_h200_are_as_fast_as_measured(size, rate):
    link = DeviceConfig.from_config(load("device/h200_ram"), QWEN3_6).link
    assert size / (link.latency_s + size / link.bytes_per_s) == pytest.approx(rate, rel=0.015)


def changed(path, value, name="m6"):
    profile = load(f"device/{name}")
    node = profile
    *folders, last = path.split(".")
    for key in folders:
        node = node[key]
    if value is None:
        del node[last]
    else:
        node[last] = value
    return profile


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("link.bytes_per_s.value", -1.0, "link.bytes_per_s is -1.0, expected more than 0"),
        ("link.bytes_per_s.value", 0, "link.bytes_per_s is 0, expected more than 0"),
        ("link.bytes_per_s.value", float("nan"), "link.bytes_per_s is nan, expected a finite number"),
        ("link.bytes_per_s.value", float("inf"), "link.bytes_per_s is inf, expected a finite number"),
        ("link.bytes_per_s.value", "fast", "link.bytes_per_s is 'fast', expected a finite number"),
        ("link.bytes_per_s.value", True, "link.bytes_per_s is True, expected a finite number"),
        ("link.bytes_per_s", 3e9, "to override one, set link.bytes_per_s.value"),
        ("link.bytes_per_s", None, "link.bytes_per_s is missing"),
        ("link.bytes_per_s.source", "guessed", "link.bytes_per_s has source 'guessed'"),
        ("link.bytes_per_s.source", None, "link.bytes_per_s has source None"),
        ("link.readers.value", 0, "link.readers is 0, expected a whole number of at least 1"),
        ("link.readers.value", 2.5, "link.readers is 2.5, expected a whole number"),
        ("link.read_splits.value", 9, "link.read_splits is 9, expected at most the 8 readers"),
        ("link.latency_s.value", -0.1, "link.latency_s is -0.1, expected at least 0"),
        (
            "link.sharing",
            "token ring",
            "link.sharing is 'token ring', expected one of fair, one_at_a_time, fixed_slots",
        ),
        ("link", None, "link is missing"),
        ("link", 3, "link must be a mapping"),
        ("label", None, "label is None, expected a text"),
        ("gpu.contention.value", 0.9, "gpu.contention is 0.9, expected at least 1"),
        ("gpu.host_s.value", -1, "gpu.host_s is -1, expected at least 0"),
        ("gpu.streams.value", 0, "gpu.streams is 0"),
        ("gpu.fits.gemma4_q4_0.b_s.value", -1e-6, "gpu.fits.gemma4_q4_0.b_s is -1e-06, expected at least 0"),
        ("gpu.fits.gemma4_q4_0.a_s", None, "gpu.fits.gemma4_q4_0.a_s is missing"),
        ("gpu.fits.gemma4_q4_0.kind", "cubic", "gpu.fits.gemma4_q4_0.kind is 'cubic', expected one of affine, table"),
    ],
)
def test_bad_constants_are_named_in_one_line(path, value, words):
    with pytest.raises(UserError) as error:
        DeviceConfig.from_config(changed(path, value), GEMMA4)
    assert words in str(error.value)
    assert str(error.value).startswith("device m6: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("points", "words"),
    [
        ([[1, 1e-5], [1, 2e-5]], "growing order"),
        ([[1, -1e-5]], "not negative"),
        ([[1, float("nan")]], "finite points"),
        ([], "finite points"),
        (3, "expected points"),
        ([1, 2], "expected points"),
    ],
)
def test_bad_tables_are_named(points, words):
    with pytest.raises(UserError, match=words):
        DeviceConfig.from_config(changed("gpu.fits.qwen3_6_q4_0.by_requests.value", points, "h200_ram"), QWEN3_6)


def test_striping_needs_readers_that_share():
    profile = changed("link.read_splits.value", 2, "h200_ram")
    with pytest.raises(UserError, match="expected 1 where one read moves at a time"):
        DeviceConfig.from_config(profile, QWEN3_6)


def test_a_profile_must_be_a_mapping():
    with pytest.raises(UserError, match="must be a mapping"):
        DeviceConfig.from_config([], GEMMA4)


@pytest.mark.parametrize(("sharing", "alone_s"), [("fair", 1.0), ("fixed_slots", 8.0), ("one_at_a_time", 1.0)])
def test_the_sharing_model_is_a_choice(sharing, alone_s):
    link = DeviceConfig.from_config(changed("link.sharing", sharing), GEMMA4).link
    assert link.bytes_per_s / link.rate(1) == pytest.approx(alone_s)
