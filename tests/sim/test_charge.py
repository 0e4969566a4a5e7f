"""What a run pays for its predictor."""

import pytest
from sim_world import device, load, tiny

from policies.core.types import Phase, UserError
from policies.prefetch.cost import Cost
from sim.charge import charge


class Predictor:
    def __init__(self, **cost):
        self.cost = Cost(**cost)


MODEL = tiny(n_layers=3, n_experts=8)
PROFILE = {"gpu": {"roofline": {"memory_bytes_per_s": {"value": 1e6}}}}


def settings(how="compute"):
    return {"device": PROFILE, "prefetch": {"charge": how}, "cache": {"fraction": 0.5, "slots": None}}


def test_reads_take_time_at_every_gate():
    dev = device(MODEL)
    predictor = Predictor(bytes_per_batch=2e6, bytes_per_token=5e5)
    own, paying, described = charge(settings(), dev, MODEL, MODEL.spec, predictor)
    assert own == settings()
    for phase, layer, gates in ((Phase.ENTRY, -1, 1), (Phase.JOB, 0, 1), (Phase.JOB, 2, 0), (Phase.HEAD, 3, 0)):
        alone_s, paid_s = (d.times.seconds(phase, layer, 4, 5, 1.0) for d in (dev, paying))
        assert paid_s - alone_s == pytest.approx(gates * (2 + 4 * 0.5))
    assert described["charge"] == "compute"
    assert (described["batch_s"], described["token_s"]) == (2.0, 0.5)


def test_memory_comes_out_of_the_cache():
    """12 slots; an expert is 3,000,000 bytes."""
    own, _, _ = charge(settings(), device(MODEL), MODEL, MODEL.spec, Predictor(memory_bytes=6.1e6))
    assert own["cache"]["slots"] == 12 - 3
    with pytest.raises(UserError, match="as much as 12 experts, and the cache has 12 slots"):
        charge(settings(), device(MODEL), MODEL, MODEL.spec, Predictor(memory_bytes=35e6))


def test_nothing_is_charged_to_who_does_not_want_it_or_has_no_predictor():
    dev = device(MODEL)
    predictor = Predictor(bytes_per_batch=2e6, memory_bytes=6e6)
    own, paying, described = charge(settings("none"), dev, MODEL, MODEL.spec, predictor)
    assert own == settings("none")
    assert paying is dev
    assert described["memory_bytes"] == 6e6
    assert charge(settings(), dev, MODEL, MODEL.spec, None)[2] is None
    with pytest.raises(UserError, match="charge is link, expected compute or none"):
        charge(settings("link"), dev, MODEL, MODEL.spec, predictor)


def test_profiles_have_the_rate_that_is_charged():
    for name in ("m6", "thor", "rtx4090", "h200_ram", "h200_disk", "cpu_disk"):
        assert load(f"device/{name}")["gpu"]["roofline"]["memory_bytes_per_s"]["value"] > 0
