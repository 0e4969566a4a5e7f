"""The same tokens whatever the system, cache, number of requests and prefetching: live runs against transformers.

Every combination is 900 runs and takes a quarter of an hour; EXECUTOR_TEST_WHOLE=1 runs them all, otherwise every
31st is tried.  ``test_prefetch_tokens`` has the predictors that a running model cannot feed.
"""

import functools
import itertools
import os

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from tiny_models import DEVICE, FAMILIES, prompts, random_model, reference, tiny_config  # noqa: E402

from conf.cells import recorded  # noqa: E402
from executor import pack  # noqa: E402
from executor.compose import settings_of  # noqa: E402
from executor.run import OpenRun  # noqa: E402
from executor.store import ExpertStore  # noqa: E402

NEW = 6
GIVEN = list(prompts([4, 9, 1, 13, 6]).values())

UNITS = ("llama_cpp", "llama_cpp_lfu", "bevy", "bevy_fifo", "bevy_global_srtf", "bevy_both", "static")
PREFETCHING = (
    *("bevy_prefetch", "mixtral_offloading", "mixtral_offloading_lfu", "specmd", "specmd_lfu"),
    *("finemoe", "finemoe_lfu", "finemoe_asis", "finemoe_asis_lfu", "moe_infinity", "moe_infinity_lfu"),
)
LEAST = {"mixtral_offloading": 28}
"""Slots of a system that splits its cache: a request's experts and two prefetches a layer, and four to stage them."""

SIZES = ("minimum", 0.1, 0.3, 0.5, 1.0)
WHOLE = [
    *itertools.product(["qwen3_moe"], [*UNITS, *PREFETCHING], SIZES, [1, 2, 5], [True, False]),
    *itertools.product(
        [family for family in FAMILIES if family != "qwen3_moe"],
        ["llama_cpp", "static", "bevy"],
        SIZES,
        [1, 2, 5],
        [True, False],
    ),
]
CASES = WHOLE if os.environ.get("EXECUTOR_TEST_WHOLE") else WHOLE[::31]


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("same")


@functools.cache
def packed(folder, family):
    """The pack of a tiny float32 checkpoint, and transformers' tokens of each prompt."""
    model = random_model(tiny_config(family))
    model.save_pretrained(folder / family / "checkpoint")
    path = folder / family / "pack"
    pack.run([f"checkpoint={folder / family / 'checkpoint'}", f"out={path}", "dtype=f32"])
    with torch.inference_mode():
        return path, [until_stop(reference(model, prompt, NEW)[1]) for prompt in GIVEN]


def until_stop(tokens, stop=2):
    return tokens[: tokens.index(stop) + 1] if stop in tokens else tokens


@functools.cache
def others(folder, family):
    """A trace of other prompts, for the predictors that learn from one."""
    path, out = packed(folder, family)[0], folder / family / "others.parquet"
    words = ["mode=live", "concurrency=2", "prompt_tokens=5", "system=llama_cpp", f"record_trace={out}"]
    given = write(folder / family / "others", prompts([5, 7], seed=4).values())
    run(path, folder, [*words, "record_columns=[token_id,weights,scores]", f"prompts={given}", "cache.fraction=1.0"])
    return out


def write(path, lists):
    path.write_text("".join(f"{tokens}\n" for tokens in lists))
    return path


def run(path, folder, words):
    fixed = [f"pack={path}", f"torch_device={DEVICE.type}", "threads=1", "readers=3", "allow_buffered=true"]
    fixed += [f"steps={NEW}", "warmup=1", "check=true"]
    (settings,) = settings_of([*fixed, *words])
    opened = OpenRun(recorded(settings), folder / "journal.jsonl.gz")
    with opened:
        opened.decode()
    if opened.recorder is not None:
        opened.recorder.write()
    return opened


def prefetching(folder, family, system, wanted):
    """The words that switch prefetching on or off."""
    learn = [f"prefetch.learn.path={others(folder, family)}"] if system.startswith(("finemoe", "moe_infinity")) else []
    if system in PREFETCHING:
        near = ["prefetch.predictor.distance=1"] if system.startswith("finemoe") else []
        return [*learn, *near] if wanted else ["prefetch=none"]
    return ["prefetch=next_gate"] if wanted else []


@pytest.mark.parametrize(
    ("family", "system", "size", "requests", "wanted"), CASES, ids=lambda value: str(value).replace(".", "_")
)
def test_tokens_are_transformers_tokens(family, system, size, requests, wanted, folder):
    path, right = packed(folder, family)
    spec = ExpertStore.open(path).spec
    least = max(spec.top_k + 2 * wanted, LEAST.get(system, 0))  # prefetches in flight may hold two slots
    slots = least if size == "minimum" else max(least, int(size * spec.n_total))
    half = requests // 2
    name = f"static_{requests - half}_{half}" if half else "static_1"
    words = [
        "mode=live",
        f"concurrency={requests}",
        f"cache.slots={slots}",
        f"prompts={write(folder / 'given', GIVEN)}",
    ]
    words += [f"system={name if system == 'static' else system}", *prefetching(folder, family, system, wanted)]
    found = run(path, folder, words)
    assert [completion.tokens for completion in found.completions] == right
