"""Making expert packs: ``python -m executor.pack``.

Owns the command: where weights come from and what is asked for.  ``executor.pack_writer`` writes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from executor.checkpoint import open_folder
from executor.errors import PackError
from executor.geometry import DTYPES
from executor.pack_writer import Source, requantised, write_pack
from policies.core.types import UserError
from traces import command

USAGE = """\
python -m executor.pack checkpoint=DIR|FILE.gguf out=DIR dtype=q4_0|bf16|f32 [shared_dtype=bf16|f32]
python -m executor.pack random=true model=NAME out=DIR dtype=q4_0|bf16|f32 [seed=0] [layers=N] [config.KEY=VALUE ...]

Writes an expert pack: experts that can be read one by one, all other weights, and a manifest.

  checkpoint    a Hugging Face folder with *.safetensors, or a GGUF file
  out           the directory to make; it must not exist
  dtype         of the experts
  shared_dtype  of all other weights (default: f32 if dtype=f32, otherwise bf16)
  random        random weights in a model's shapes, for timing only; labelled random everywhere
  model         {models}
  layers        cut a random model to its first N layers
  config.KEY    change a value of a random model's Hugging Face config
"""


def random_source(name: str, seed: int = 0, overrides: Mapping[str, Any] | None = None) -> Source:
    """Random weights in the shapes of a known model, with some values of its config changed."""
    from executor.known_models import MODELS  # noqa: PLC0415
    from executor.random_weights import RandomSource  # noqa: PLC0415 - transformers takes seconds

    if name not in MODELS:
        raise PackError(f"model {name!r} is unknown; known: {', '.join(MODELS)}")
    return RandomSource(name, {**MODELS[name], **(overrides or {})}, seed)


def _source(given: Mapping[str, str]) -> Source:
    if command.flag(given, "random"):
        if "model" not in given or "checkpoint" in given:
            raise UserError("random=true needs model=NAME and no checkpoint=")
        overrides: dict[str, Any] = {}
        for key, text in given.items():
            if key.startswith("config."):
                try:
                    overrides[key.removeprefix("config.")] = json.loads(text)
                except ValueError as error:
                    raise UserError(f"{key}={text!r} is not a JSON value") from error
        if (layers := command.whole_number(given, "layers")) is not None:
            overrides["num_hidden_layers"] = layers
        return random_source(given["model"], command.whole_number(given, "seed", least=0) or 0, overrides)
    only_random = [key for key in given if key in {"model", "seed", "layers"} or key.startswith("config.")]
    if only_random:
        raise UserError(f"{only_random[0]}= is for random=true; a checkpoint brings its own config")
    if "checkpoint" not in given:
        raise UserError("checkpoint=DIR|FILE.gguf is missing (or random=true model=NAME); --help shows the usage")
    path = Path(given["checkpoint"])
    if path.suffix == ".gguf":
        from executor.gguf_file import open_gguf  # noqa: PLC0415

        return open_gguf(path)
    return open_folder(path)


def run(arguments: Sequence[str]) -> int:
    """The command, with its arguments; raises instead of exiting."""
    keys = ("checkpoint", "out", "dtype", "shared_dtype", "random", "model", "seed", "layers")
    given = command.parse(arguments, keys, prefixes=("config.",))
    for key in ("out", "dtype"):
        if key not in given:
            raise UserError(f"{key}= is missing; --help shows the usage")
    if given["dtype"] not in DTYPES:
        raise UserError(f"dtype={given['dtype']!r} is unknown; use one of {', '.join(DTYPES)}")
    out = Path(given["out"])
    if out.exists():
        raise PackError(f"{out} exists; remove it or choose another out=")
    source = _source(given)
    try:
        if losing := requantised(source, given["dtype"]):
            kinds = ", ".join(f"{n} of {kind}" for kind, n in losing.items())
            print(f"note: expert matrices ({kinds}) are quantised a second time and lose precision", file=sys.stderr)
        manifest = write_pack(source, out, given["dtype"], shared_dtype=given.get("shared_dtype"))
    finally:
        source.close()
    noise = "; RANDOM weights, for timing only" if manifest.random else ""
    print(
        f"{out}: {manifest.family}, {len(manifest.layers)} x {manifest.n_experts} experts of "
        f"{manifest.expert_bytes} bytes ({manifest.dtype}){noise}"
    )
    return 0


def main(arguments: Sequence[str]) -> int:
    """Exit status: 0, 2 for bad input, 130 if interrupted."""
    return command.run(run, _usage, arguments, "nothing was kept")


def _usage() -> str:
    from executor.known_models import MODELS  # noqa: PLC0415

    return USAGE.format(models=", ".join(MODELS))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
