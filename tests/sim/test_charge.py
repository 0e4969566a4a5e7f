"""What a run pays for its predictor."""

import pytest
from sim_world import device, load, tiny

from conf.devices import small_products
from policies.core.types import Phase, UserError
from policies.prefetch.cost import Cost
from sim.charge import charge


class Predictor:
    def __init__(self, **cost):
        self.cost = Cost(**cost)


MODEL = tiny(n_layers=3, n_experts=8)


def rate(value):
    return {"value": value, "source": "assumed"}


ROOFLINE = {"memory_bytes_per_s": rate(2e6), "dense_efficiency": rate(0.5)}  # weights at 1e6 bytes/s
PROFILE = {"gpu": {"roofline": ROOFLINE, "small_products": {"operations_per_s": rate(4e6), "kernel_s": rate(0.25)}}}


def settings(how="compute", profile=PROFILE):
    cache = {"fraction": 0.5, "slots": None}
    return {"device": profile, "prefetch": {"charge": how}, "cache": cache, "concurrency": 4}


@pytest.mark.parametrize(
    ("cost", "four_s", "one_s"),
    [
        ({"bytes_per_batch": 2e6, "bytes_per_token": 5e5}, 2 + 4 * 0.5, 2 + 0.5),
        ({"kernels": 3}, 0.75, 0.75),
        ({"operations_per_token": 1e6}, 4 / 4, 1 / 4),
        ({"kernels": 2, "operations_per_token": 3e6, "bytes_per_batch": 2e6}, 0.5 + 3, 0.5 + 2),  # the slower of both
    ],
)
def test_a_prediction_takes_time_at_every_gate(cost, four_s, one_s):
    dev = device(MODEL)
    own, paying, described = charge(settings(), dev, MODEL, MODEL.spec, Predictor(**cost))
    assert own == settings()
    for phase, layer, gates in ((Phase.ENTRY, -1, 1), (Phase.JOB, 0, 1), (Phase.JOB, 2, 0), (Phase.HEAD, 3, 0)):
        for requests, prediction_s in ((4, four_s), (1, one_s)):
            alone_s, paid_s = (d.times.seconds(phase, layer, requests, 5, 1.0) for d in (dev, paying))
            assert paid_s - alone_s == pytest.approx(gates * prediction_s)
    assert described["charge"] == "compute"
    assert (described["all_requests_s"], described["one_request_s"]) == pytest.approx((four_s, one_s))
    assert described["sources"]["gpu.small_products.kernel_s"] == "assumed"


def test_a_profile_without_small_products_charges_the_reads():
    profile = {"gpu": {"roofline": ROOFLINE}}
    predictor = Predictor(kernels=3, operations_per_token=1e9, bytes_per_batch=2e6)
    described = charge(settings(profile=profile), device(MODEL), MODEL, MODEL.spec, predictor)[2]
    assert (described["all_requests_s"], described["one_request_s"]) == (2.0, 2.0)
    broken = {"gpu": {"roofline": ROOFLINE, "small_products": {"operations_per_s": rate(0), "kernel_s": rate(0)}}}
    with pytest.raises(UserError, match=r"small_products\.operations_per_s is 0, expected more than 0"):
        charge(settings(profile=broken), device(MODEL), MODEL, MODEL.spec, predictor)


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


def test_profiles_have_the_rates_that_are_charged():
    for name in ("m6", "thor", "rtx4090", "h200_ram", "h200_disk", "cpu_disk"):
        rates, sources = small_products(load(f"device/{name}"))
        assert rates.kernel_s > 0
        assert "gpu.small_products.operations_per_s" in sources
