"""Reader of NumPy files: ``.npy``, or ``.npz`` of expert ids as vLLM, SGLang and trace collections store them.

Shapes: [requests, tokens, layers, k]; [tokens, layers, k] of one request; [all tokens, layers, k] with ``lens``,
the number of tokens of each request.  Negative ids are padding.  Recognised beside the ids: ``weights`` (or the ids'
name with ``w`` for ``ids``) of the same shape, the prompt's ids under the same name with ``prefill`` for ``decode``
or as ``prompt_routed_experts``, ``lens``, ``n_expert(s)``, and one text label a request (any array of text).
"""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

import numpy as np

from traces.format import DECODE, PREFILL, Array, Trace, TraceError
from traces.readers.common import Options, RawRequest, Report, build


def read(path: Path, options: Options, report: Report) -> Trace:
    """Read one file; ``options.key`` names the array of ids where there are several."""
    arrays = _load(path)
    name = _ids_name(path, arrays, options.key)
    ids = arrays[name]
    if ids.ndim not in (3, 4) or ids.dtype.kind not in "iu":
        raise TraceError(
            f"{path}: array {name} is {ids.dtype} {list(ids.shape)}, expected integers [requests, tokens, layers, k] "
            f"or [tokens, layers, k]"
        )
    weights = _same_shape(path, arrays, name, ids)
    parts = _split(path, ids, arrays.get("lens"))
    weight_parts = [None] * len(parts) if weights is None else _split(path, weights, arrays.get("lens"))
    labels = _labels(arrays, len(parts))
    ranked = "routed_experts" in name
    raw = [
        RawRequest(part.astype(np.int64), _phase(name, part), weight, label, ranked)
        for part, weight, label in zip(parts, weight_parts, labels, strict=True)
    ]
    prompt = _prompt_name(name)
    if prompt is not None and prompt in arrays:
        _prepend_prompt(path, raw, arrays, prompt)
    return build(
        raw,
        options,
        report,
        source=path.name,
        model=path.stem if name in ("ids", "routed_experts", "array") else name.split("_")[0],
        n_experts=_scalar(arrays, "n_expert", "n_experts", "num_experts"),
    )


def _load(path: Path) -> dict[str, Array]:
    try:
        with path.open("rb") as file:
            loaded = np.load(file, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                return {"array": loaded}
            return {name: loaded[name] for name in loaded.files}
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error, KeyError, SyntaxError, NotImplementedError) as error:
        if "pickle" in str(error).lower():
            raise TraceError(
                f"{path} holds Python objects (pickle), which are never loaded; store plain arrays"
            ) from None
        raise TraceError(f"{path} is no readable npy or npz file: {' '.join(str(error).split())[:120]}") from None


def _ids_name(path: Path, arrays: dict[str, Array], key: str | None) -> str:
    if key is not None:
        if key not in arrays:
            raise TraceError(f"{path} has no array {key}; it has {', '.join(arrays)}")
        return key
    for usual in ("ids", "routed_experts"):
        if usual in arrays:
            return usual
    found = [name for name, array in arrays.items() if array.dtype.kind in "iu" and array.ndim in (3, 4)]
    if len(found) == 1:
        return found[0]
    if not found:
        shapes = [f"{name} {list(array.shape)}" for name, array in arrays.items()]
        raise TraceError(
            f"{path} has no integer array [requests, tokens, layers, k] or [tokens, layers, k]; it has "
            f"{', '.join(shapes[:6])}{', ...' if len(shapes) > 6 else ''}"
        )
    raise TraceError(f"{path} has several arrays of ids; choose one with key= {', '.join(found)}")


def _same_shape(path: Path, arrays: dict[str, Array], name: str, ids: Array) -> Array | None:
    """The mixing weights that belong to an array of ids."""
    for candidate in ("weights", name.removesuffix("ids") + "w"):
        if candidate in arrays and candidate != name and arrays[candidate].dtype.kind == "f":
            weights = arrays[candidate]
            if weights.shape != ids.shape:
                raise TraceError(f"{path}: {candidate} has shape {list(weights.shape)}, {name} has {list(ids.shape)}")
            return weights
    return None


def _split(path: Path, array: Array, lens: Array | None) -> list[Array]:
    if array.ndim == 4:
        if lens is None:
            return list(array)
        if lens.shape != array.shape[:1] or (lens < 0).any() or (lens > array.shape[1]).any():
            raise TraceError(f"{path}: lens must hold {len(array)} lengths from 0 to {array.shape[1]}")
        return [request[: int(tokens)] for request, tokens in zip(array, lens, strict=True)]
    if lens is None:
        return [array]
    if lens.ndim != 1 or (lens < 0).any() or int(lens.sum()) != len(array):
        raise TraceError(f"{path}: lens sums to {int(lens.sum())}, the ids have {len(array)} tokens; they must agree")
    return np.split(array, np.cumsum(lens.astype(np.int64))[:-1])


def _phase(name: str, part: Array) -> Array | None:
    return np.full(len(part), PREFILL, np.uint8) if "prefill" in name or "prompt" in name else None


def _prompt_name(name: str) -> str | None:
    if "decode" in name:
        return name.replace("decode", "prefill")
    return f"prompt_{name}" if name == "routed_experts" else None


def _prepend_prompt(path: Path, raw: list[RawRequest], arrays: dict[str, Array], prompt: str) -> None:
    ids = arrays[prompt]
    if ids.dtype.kind not in "iu" or ids.ndim not in (3, 4):
        raise TraceError(
            f"{path}: array {prompt} is {ids.dtype} {list(ids.shape)}, expected integers like the decode ids"
        )
    weights = _same_shape(path, {n: a for n, a in arrays.items() if n != "weights"}, prompt, ids)
    parts = _split(path, ids, None)
    weight_parts = [None] * len(parts) if weights is None else _split(path, weights, None)
    if len(parts) != len(raw) or parts[0].shape[1:] != raw[0].ids.shape[1:]:
        raise TraceError(
            f"{path}: {prompt} {list(ids.shape)} does not fit the decode ids; they must agree in all but tokens"
        )
    for request, part, weight in zip(raw, parts, weight_parts, strict=True):
        tokens = _until_padding(part)
        request.phase = np.concatenate([np.full(tokens, PREFILL), np.full(len(request.ids), DECODE)])
        request.ids = np.concatenate([part[:tokens].astype(np.int64), request.ids])
        if request.weights is not None and weight is not None:
            request.weights = np.concatenate([weight[:tokens], request.weights])
        else:
            request.weights = None


def _until_padding(part: Array) -> int:
    seen = np.flatnonzero((part.astype(np.int64) >= 0).any(axis=(1, 2)))
    return int(seen[-1]) + 1 if len(seen) else 0


def _labels(arrays: dict[str, Array], requests: int) -> list[str]:
    for array in arrays.values():
        if array.dtype.kind == "U" and array.shape == (requests,):
            return [str(label) for label in array]
    return [""] * requests


def _scalar(arrays: dict[str, Array], *names: str) -> int | None:
    for name in names:
        if name in arrays and arrays[name].ndim == 0 and arrays[name].dtype.kind in "iu":
            return int(arrays[name])
    return None
