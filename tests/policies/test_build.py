"""From YAML to policies: every option builds, and what cannot be built is one clear line."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import policies.build
from policies.build import build_core, build_predictor, cache_slots, static_system
from policies.core.types import CapacityError, ModelSpec, UserError
from policies.eviction import LFU, LRU, FineMoEScore, LeastStale, PerLayer, Random
from policies.prefetch import OraclePredictor

CONF = Path(policies.build.__file__).resolve().parents[1] / "conf"
MODEL = ModelSpec("small", n_layers=4, n_experts=10, top_k=2)
HOST = {"fetch_s": 1.0, "expert_s": 1.0, "move_s": 0.5, "token_share": 0.3}

PRIMARY = """
defaults:
  - schedule: bevy
  - cache: lfu
  - prefetch: none
  - system: null
  - _self_
model: {n_layers: 4, n_experts: 10, top_k: 2, hidden: 16}
seed: 5
concurrency: 8
strict: false
hydra:
  searchpath: ["file://CONF"]
"""


def options(group):
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


@pytest.fixture
def composed(tmp_path):
    """A function from overrides to a composed config, over this project's policy groups only."""
    (tmp_path / "primary.yaml").write_text(PRIMARY.replace("CONF", str(CONF)))
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        yield lambda *overrides: compose("primary", list(overrides))


EVICTION = {
    "finemoe": FineMoEScore,
    "finemoe_asis": FineMoEScore,
    "least_stale": LeastStale,
    "least_stale_fifo": LeastStale,
    "lfu": LFU,
    "lfu_decay": LFU,
    "lfu_in_cache": LFU,
    "lru": LRU,
    "per_layer_lru": PerLayer,
    "random": Random,
}


@pytest.mark.parametrize("name", options("cache"))
def test_every_cache_builds(composed, name):
    core = build_core(composed(f"cache={name}"), MODEL, fetch_slots=8)
    assert core.cache.capacity == 12
    assert name not in EVICTION or type(core.cache.eviction) is EVICTION[name]


@pytest.mark.parametrize("name", options("schedule"))
def test_every_schedule_builds(composed, name):
    build_core(composed(f"schedule={name}"), MODEL, fetch_slots=8, host_times=HOST)


@pytest.mark.parametrize("name", options("prefetch"))
def test_every_prefetch_builds(composed, name):
    config = composed(f"prefetch={name}")
    build_core(config, MODEL, fetch_slots=8)
    if name == "promoe":  # has nothing to predict with before it was trained
        with pytest.raises(UserError, match="train_promoe"):
            build_predictor(config, MODEL)
        return
    predictor = build_predictor(config, MODEL)
    assert (predictor is None) == (name == "none")
    assert name != "oracle" or isinstance(predictor, OraclePredictor)


@pytest.mark.parametrize("name", options("system"))
def test_every_system_builds(composed, name):
    config = composed(f"system={name}", "cache.fraction=0.5")
    assert config.system.name == name
    assert config.system.label
    assert build_core(config, MODEL, fetch_slots=8, host_times=HOST).cache.capacity == 20


def test_what_needs_a_cpu_says_so(composed):
    with pytest.raises(UserError, match="cpu section"):
        build_core(composed("system=bevy_cpu"), MODEL, fetch_slots=8)


def test_the_paper_s_systems_are_these_tuples(composed):
    def tuple_of(name):
        config = composed(f"system={name}")
        parts = [config.schedule[key] for key in ("partition", "batching", "compute_order", "fetch_order")]
        return [part._target_.rpartition(".")[2] for part in (*parts, config.cache.eviction)]

    bevy = ["PerRequest", "SameLayer", "LowestLayerFirst", "LowestLayerThenSrtf", "LFU"]
    assert tuple_of("bevy") == bevy
    assert tuple_of("bevy_fifo") == [*bevy[:2], "Fifo", *bevy[3:]]
    assert tuple_of("bevy_global_srtf") == [*bevy[:3], "GlobalSrtf", "LFU"]
    assert tuple_of("bevy_both") == [*bevy[:2], "Fifo", "GlobalSrtf", "LFU"]
    assert tuple_of("llama_cpp") == ["OneUnit", "Alone", *bevy[2:4], "LRU"]
    assert tuple_of("llama_cpp_lfu") == ["OneUnit", "Alone", *bevy[2:4], "LFU"]


def test_an_eviction_by_hand_wins_over_the_system_s(composed):
    core = build_core(composed("system=bevy", "cache=lru"), MODEL, fetch_slots=8)
    assert type(core.cache.eviction) is LRU


@pytest.mark.parametrize(("name", "sizes"), [("static_5_3", [5, 3]), ("static_1_1_1_1_1_1_1_1", [1] * 8)])
def test_static_groupings_of_any_sizes(composed, tmp_path, name, sizes):
    (tmp_path / "system").mkdir()
    content = OmegaConf.to_yaml(OmegaConf.create(static_system(name)))
    (tmp_path / "system" / f"{name}.yaml").write_text("# @package _global_\n" + content)
    config = composed(f"system={name}")
    assert config.schedule.partition == {"_target_": "policies.schedule.Sizes", "sizes": sizes}
    assert config.schedule.batching._target_.endswith("Alone")
    assert config.system == {"name": name, "label": "static " + ":".join(map(str, sizes))}
    build_core(config, MODEL, fetch_slots=8)


@pytest.mark.parametrize("name", ["static", "static_", "static_0_3", "static_a", "bevy", "static_3_"])
def test_other_names_are_no_static_grouping(name):
    with pytest.raises(UserError, match="as in static_3_3"):
        static_system(name)


def test_the_seed_and_the_shape_reach_the_policies(composed):
    config = composed("cache=per_layer_lru", "cache.slots=22", "prefetch=oracle")
    core = build_core(config, MODEL, fetch_slots=8)
    assert [core.cache.eviction.room(layer, 22) for layer in range(4)] == [6, 6, 5, 5]
    assert composed("cache=random").cache.eviction.seed == 5
    assert config.prefetch.predictor.seed == 5


# ------------------------------------------------------------------ the size of the cache


@pytest.mark.parametrize(
    ("cache", "slots"),
    [
        ({"fraction": 0.3, "slots": None}, 12),
        ({"fraction": 0.29, "slots": None}, 11),
        ({"fraction": 1, "slots": None}, 40),
        ({"fraction": 1e-9, "slots": 7}, 7),
        ({"fraction": 0.05, "slots": None}, 2),
        ({"slots": 40}, 40),
    ],
)
def test_slots(cache, slots):
    assert cache_slots({"cache": cache}, MODEL) == slots


def test_a_fraction_is_taken_at_its_word():
    """0.29 x 100 is 28.999999999999996 in floating point."""
    assert cache_slots({"cache": {"fraction": 0.29}}, ModelSpec("hundred", 10, 10, 2)) == 29


@pytest.mark.parametrize("fraction", [0, -0.1, 1.01, float("nan"), float("inf"), None, "much", True])
def test_fractions_that_are_none(fraction):
    with pytest.raises(UserError, match=r"above 0 and at most 1; use at least cache.slots=2"):
        cache_slots({"cache": {"fraction": fraction, "slots": None}}, MODEL)


@pytest.mark.parametrize("slots", [0, -3, 41, 2.5, "many", True])
def test_slots_that_are_none(slots):
    with pytest.raises(UserError, match=r"whole number from 2 .* to 40"):
        cache_slots({"cache": {"fraction": 0.3, "slots": slots}}, MODEL)


@pytest.mark.parametrize("cache", [{"slots": 1}, {"fraction": 0.049}])
def test_a_cache_below_top_k_names_the_minimum(cache):
    with pytest.raises(CapacityError, match=r"at least cache.slots=2 or cache.fraction=0.05"):
        cache_slots({"cache": cache}, MODEL)


@pytest.mark.parametrize("top_k", [1, 3, 7, 9])
def test_the_named_minimum_works(top_k):
    model = ModelSpec("odd", 7, 9, top_k)
    with pytest.raises(CapacityError) as error:
        cache_slots({"cache": {"fraction": 0.001}}, model)
    named = float(str(error.value).rpartition("cache.fraction=")[2])
    assert cache_slots({"cache": {"fraction": named}}, model) == top_k


def test_a_split_cache_below_top_k_a_layer_is_refused(composed):
    with pytest.raises(CapacityError, match=r"raise cache\.slots"):
        build_core(composed("cache=per_layer_lru", "cache.slots=7"), MODEL, fetch_slots=8)


# ------------------------------------------------------------------ what cannot be built

HAS_CACHES = "conf/cache has .*lfu, .*lru"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["cache.eviction._target_=policies.eviction.LRUU"], f"LRUU.*{HAS_CACHES}"),
        (["cache.eviction._target_=polices.eviction.LRU"], f"polices.*{HAS_CACHES}"),
        (["+cache.eviction.size=3"], f"unexpected keyword argument 'size'.*{HAS_CACHES}"),
        (["cache.eviction.count=kept"], "keep, in_cache, decay"),
        (["cache.eviction=null"], f"expected a node with a _target_; {HAS_CACHES}"),
        (["cache.eviction._target_=policies.schedule.Alone", "~cache.eviction.count"], "no method 'victim'"),
        (["cache.eviction._target_=policies.core.expert_cache.Entry"], "cannot make a"),
        (["schedule.partition._target_=policies.schedule.Fifo"], "no method 'units'.*conf/schedule has .*batch, bevy"),
        (["schedule=static", "schedule.partition.sizes=[3,3]"], r"\[3, 3\] hold 6 requests but concurrency is 8"),
        (["schedule.compute_slots=0"], "compute_slots is 0"),
        (["schedule.compute_slots=two"], "compute_slots is two"),
        (["prefetch=oracle", "prefetch.policy.max_in_flight=0"], "at least 1 reader"),
        (["prefetch=oracle", "prefetch.policy._target_=policies.prefetch.Gone"], "conf/prefetch has bevy, co"),
    ],
)
def test_wrong_policies_are_one_clear_line(composed, overrides, says):
    with pytest.raises(UserError, match=says) as error:
        build_core(composed(*overrides), MODEL, fetch_slots=8)
    assert "\n" not in str(error.value)


def test_wrong_predictors_are_one_clear_line(composed):
    with pytest.raises(UserError, match="raise the precision"):
        build_predictor(composed("prefetch=oracle", "prefetch.predictor.precision=0.01"), MODEL)
    with pytest.raises(UserError, match="no method 'predict'"):
        build_predictor(composed("+prefetch.predictor._target_=policies.prefetch.Ranked"), MODEL)


def test_a_plain_mapping_is_a_config_too():
    config = {
        "schedule": {
            "partition": {"_target_": "policies.schedule.PerRequest"},
            "batching": {"_target_": "policies.schedule.SameLayer"},
            "compute_order": {"_target_": "policies.schedule.LowestLayerFirst"},
            "fetch_order": {"_target_": "policies.schedule.GlobalSrtf"},
        },
        "cache": {"slots": 20, "eviction": {"_target_": "policies.eviction.LRU"}},
    }
    assert build_core(config, MODEL, fetch_slots=2).cache.capacity == 20
    assert build_predictor(config, MODEL) is None
