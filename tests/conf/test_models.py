"""Sizes that follow from shapes, against counts of full-size models and published file sizes."""

import dataclasses
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from conf.models import ModelConfig
from policies.core.types import UserError

FOLDER = Path(__file__).resolve().parents[2] / "conf" / "model"

# Experts in all; parameters, bf16 bytes and Q4_0 bytes of one.
EXPERTS = {
    "qwen3_6_35b_a3b": (10_240, 3_145_728, 6_291_456, 1_769_472),
    "gemma4_26b_a4b": (3_840, 5_947_392, 11_894_784, 3_345_408),
    "mixtral_8x7b": (256, 176_160_768, 352_321_536, 99_090_432),
    "qwen3_30b_a3b": (6_144, 4_718_592, 9_437_184, 2_654_208),
    "olmoe_1b_7b": (1_024, 6_291_456, 12_582_912, 3_538_944),
    "deepseek_v2_lite": (1_664, 8_650_752, 17_301_504, 4_866_048),
    "gpt_oss_20b": (768, 24_883_200, 49_783_680, 13_996_800),
    "gpt_oss_120b": (4_608, 24_883_200, 49_783_680, 13_996_800),
    "glm_4_5_air": (5_760, 17_301_504, 34_603_008, 9_732_096),
    "demo": (384, 24_576, 49_152, 13_824),
}
# Full-size models built by transformers on the meta device: all parameters (1e9), body and head (1e6).
PARAMETERS = {
    "qwen3_6_35b_a3b": (34.66, 1431.2, 508.6),
    "gemma4_26b_a4b": (25.23, 1657.0, 738.2),
    "mixtral_8x7b": (46.70, 1343.5, 131.1),
    "qwen3_30b_a3b": (30.53, 918.8, 311.2),
    "olmoe_1b_7b": (6.92, 270.7, 103.0),
    "deepseek_v2_lite": (15.71, 892.2, 209.7),
    "gpt_oss_20b": (20.915, 639.6, 579.1),
    "gpt_oss_120b": (116.83, 969.3, 579.1),
    "glm_4_5_air": (106.85, 5954.1, 620.8),
}
# bf16 body and head in GB; GGUF-like body as Q4_0 and f32, head in Q6_K, body a layer, all in MB.
BYTES = {
    "qwen3_6_35b_a3b": (3.880, 793, 89, 417, 22.0),
    "gemma4_26b_a4b": (4.790, 926, 46, 606, 32.4),
    "mixtral_8x7b": (2.949, 755, 5, 108, 23.8),
    "qwen3_30b_a3b": (2.460, 510, 51, 255, 11.7),
    "olmoe_1b_7b": (0.747, 151, 9, 85, 10.0),
    "deepseek_v2_lite": (2.204, 500, 14, 172, 19.0),
    "gpt_oss_20b": (2.437, 358, 10, 475, 15.4),
    "gpt_oss_120b": (3.097, 538, 55, 475, 16.5),
    "glm_4_5_air": (13.150, 3335, 98, 509, 74.7),
}


def config(name):
    return OmegaConf.to_container(OmegaConf.load(FOLDER / f"{name}.yaml"))


def model(name, **changes):
    return ModelConfig.from_config(config(name) | changes)


def test_every_model_has_a_file():
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(EXPERTS)


@pytest.mark.parametrize("name", EXPERTS)
def test_experts(name):
    count, parameters, bf16, q4_0 = EXPERTS[name]
    assert model(name).spec.n_total == count
    assert model(name).expert_parameters == parameters
    assert model(name, quantisation="bf16").expert_bytes == bf16
    assert model(name, quantisation="q4_0").expert_bytes == q4_0
    assert model(name).name == name


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(name):
    everything, body, head = PARAMETERS[name]
    assert model(name).parameters / 1e9 == pytest.approx(everything, abs=0.0051)
    assert model(name).body_parameters / 1e6 == pytest.approx(body, abs=0.051)
    assert model(name).head_parameters / 1e6 == pytest.approx(head, abs=0.051)


@pytest.mark.parametrize("name", BYTES)
def test_bytes(name):
    shared, matrices, small, head, layer = BYTES[name]
    bf16, q4_0 = model(name, quantisation="bf16"), model(name, quantisation="q4_0")
    assert (bf16.body_bytes + bf16.head_bytes) / 1e9 == pytest.approx(shared, abs=0.00051)
    assert q4_0.body_matrix_bytes / 1e6 == pytest.approx(matrices, abs=0.6)
    assert q4_0.body_small_bytes / 1e6 == pytest.approx(small, abs=0.6)
    assert q4_0.head_bytes / 1e6 == pytest.approx(head, abs=0.51)
    assert q4_0.body_bytes_per_layer / 1e6 == pytest.approx(layer, abs=0.06)


@pytest.mark.parametrize("name", BYTES)
def test_the_parts_of_the_body_add_up(name):
    m = model(name)
    parts = m.n_layers * (m.attention_bytes_per_layer + m.shared_bytes_per_layer) + m.dense_bytes
    assert parts == pytest.approx(m.body_bytes, rel=1e-12)


def test_state_of_gemma4():
    """fp16: 8,192 bytes a token and sliding layer, up to 1,024 tokens; 20,480 a token for the five full layers."""
    m = model("gemma4_26b_a4b")
    assert m.state_bytes(500) == 25 * 8_192 * 500 + 20_480 * 500
    assert m.state_bytes(8_000) == 25 * 8_192 * 1_024 + 20_480 * 8_000


def test_state_of_qwen3_6():
    """Ten full layers at 20,480 bytes a token together; 63 MB of f32 state read and as much written."""
    m = model("qwen3_6_35b_a3b")
    assert m.state_bytes(0) == 2 * 30 * 524_288 * 4
    assert m.state_bytes(1_000) - m.state_bytes(0) == 20_480_000


def test_state_of_latent_attention():
    """One latent of 512 and one rotary key of 64 in fp16, a token and layer."""
    assert model("deepseek_v2_lite").state_bytes(10) == 27 * 10 * (512 + 64) * 2


def test_a_composed_config_is_accepted():
    assert ModelConfig.from_config(OmegaConf.load(FOLDER / "olmoe_1b_7b.yaml")) == model("olmoe_1b_7b")
    assert dataclasses.replace(model("olmoe_1b_7b"), quantisation="bf16").quantisation == "bf16"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"top_k": 9, "n_experts": 8}, "top_k 9 is above its 8 experts"),
        ({"hidden": 0}, "hidden is 0"),
        ({"hidden": -4}, "hidden is -4"),
        ({"n_layers": 2.5}, "n_layers is 2.5"),
        ({"n_experts": True}, "n_experts is True"),
        ({"vocabulary": "many"}, "vocabulary is 'many'"),
        ({"quantisation": "q5_1"}, "unknown quantisation 'q5_1'; use one of: f32, bf16, q4_0"),
        ({"quantisation": None}, "quantisation is None"),
        ({"tied_head": 1}, "tied_head is 1"),
        ({"experts": 3}, "unknown key 'experts'"),
        ({"attention": []}, "attention must be a list"),
        ({"attention": "full"}, "attention must be a list"),
        ({"attention": [3]}, "attention[0]: expected a mapping"),
        ({"attention": [{"kind": "full", "layers": 16}]}, "attention[0]: key 'heads' is missing"),
        (
            {"attention": [{"kind": "ring", "layers": 16, "heads": 1, "kv_heads": 1, "head_dim": 1}]},
            "unknown kind 'ring'",
        ),
        (
            {"attention": [{"kind": "sliding", "layers": 16, "heads": 1, "kv_heads": 1, "head_dim": 1}]},
            "window_tokens is 0",
        ),
        ({"attention": [{"kind": "full", "layers": 9, "heads": 1, "kv_heads": 1, "head_dim": 1}]}, "lists 9 layers"),
        ({"dense_layers": 1}, "dense_intermediate must be at least 1"),
    ],
)
def test_bad_models_are_refused_in_one_line(changes, words):
    with pytest.raises(UserError) as error:
        model("olmoe_1b_7b", **changes)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_shape_is_named():
    shapes = config("olmoe_1b_7b")
    del shapes["hidden"]
    with pytest.raises(UserError, match="key 'hidden' is missing"):
        ModelConfig.from_config(shapes)
