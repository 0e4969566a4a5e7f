"""Record the routing of a Mixture-of-Experts model while it answers the prompts of a data set.

usage: python -m traces.capture model=DIR_OR_NAME dataset=sharegpt|swe_agent|text path=PATH out=TRACE [key=value ...]

  model=DIR_OR_NAME  a Hugging Face folder or name; demo: the small model that comes along
  dataset=NAME       sharegpt | swe_agent | text
  path=PATH          file or folder: JSON array, JSON lines, gz, Parquet, .traj; for text, files or passages of a file
  out=TRACE          the trace (Parquet)
  requests=N         how many prompts                                          (default 32)
  steps=N            decode tokens of a request, at most                       (default 512)
  lengths=HOW        model: until its end token; full: all steps; dataset: as long as the recorded answer;
                     or a JSON-lines file of token counts and arrivals         (default model)
  batch=N            requests that decode together                             (default 8)
  max_prompt=N       longest prompt, in tokens               (default 1024, or what the context leaves)
  cut=true           take the end of prompts that are too long, instead of shorter ones
  seed=N             which prompts are drawn, and the sampling                 (default 0)
  temperature=X      0: the likeliest token                                    (default 0)
  repeat=true        take prompts again where there are too few
  prefill=false      leave the prompts' tokens out
  columns=A,B        columns beside the ids; hidden (boundary states) only on request
                     (default weights,token_id,scores, and the next three gates: next_scores_1 to 3 on this gate's
                     input, next_norm_scores_1 to 3 in their own layer's norm; where a router has a norm of its own,
                     as in Gemma 4, the two are one and the second is left out)
  device=NAME        cuda | cpu                                                (default cuda if there is one)
  dtype=NAME         auto (the checkpoint's) | f32 | bf16 | f16                (default auto)
  overwrite=true     replace an existing trace

Broken off, the same command goes on where it stopped (the rows so far lie in OUT.parts).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from policies.core.types import ModelSpec, UserError
from traces.command import flag, parse, run
from traces.demo import MODEL
from traces.format import COLUMN_DTYPES, NEXT_NORM_SCORES, NEXT_SCORES, Array
from traces.lengths import read_lengths
from traces.prompts import Conversation, Limits, Message, Prompt, Tally, Tokenizer, select
from traces.sharegpt import read_sharegpt
from traces.spool import Spool
from traces.storage import VERSION
from traces.swe_agent import read_swe_agent
from traces.text import read_text

if TYPE_CHECKING:
    from traces.hooks import RouterHooks

READERS: dict[str, Callable[[str, Tally], Iterator[Conversation]]] = {
    "sharegpt": read_sharegpt,
    "swe_agent": read_swe_agent,
    "text": read_text,
}
DEFAULT_COLUMNS = ("weights", "token_id", "scores", *NEXT_SCORES, *NEXT_NORM_SCORES)
LENGTHS = ("model", "full", "dataset")
SMALL_HIDDEN = 256
"""Products of so few numbers take longer if several threads share them."""
NEEDED = ("model", "dataset", "path", "out")
CHOICES: dict[str, tuple[str, ...]] = {
    "dataset": tuple(READERS),
    "dtype": ("auto", "f32", "bf16", "f16"),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command asks for."""

    model: str
    dataset: str
    path: str
    out: str
    requests: int = 32
    steps: int = 512
    lengths: str = "model"
    batch: int = 8
    max_prompt: int = 1024
    cut: bool = False
    seed: int = 0
    temperature: float = 0.0
    repeat: bool = False
    prefill: bool = True
    columns: tuple[str, ...] = DEFAULT_COLUMNS
    device: str = ""
    dtype: str = "auto"
    overwrite: bool = False


def main(argv: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    settings = read_settings(parse(argv, tuple(field.name for field in fields(Settings))))
    out = Path(settings.out)
    if out.exists() and not settings.overwrite:
        raise UserError(f"{out} exists; choose another out= or add overwrite=true")
    if not Path(settings.path).exists():
        raise UserError(f"path {settings.path} is not there; give a file or folder of {settings.dataset}")
    model, tokenizer = load(settings)
    print("\n".join(capture(settings, model, tokenizer)))
    return 0


def read_settings(arguments: Mapping[str, str]) -> Settings:
    """The settings of the command's words.  Raises UserError for the first that is wrong."""
    if missing := [key for key in NEEDED if key not in arguments]:
        raise UserError(
            f"{missing[0]}= is missing; usage: python -m traces.capture model= dataset={'|'.join(READERS)} path= out="
        )
    values: dict[str, Any] = {}
    for setting in fields(Settings):
        name = setting.name
        if name in arguments:
            values[name] = _value(name, arguments[name], getattr(Settings(*NEEDED), name))
    return Settings(**values)


def _value(name: str, text: str, default: Any) -> Any:
    if name in CHOICES and text not in CHOICES[name]:
        raise UserError(f"{name} is {text}, expected {' or '.join(CHOICES[name])}")
    if isinstance(default, bool):
        return flag({name: text}, name)
    if isinstance(default, (int, float)):
        least = 0 if name in ("seed", "temperature") else 1
        try:
            value = type(default)(text)
        except ValueError:
            value = least - 1
        if not least <= value < float("inf"):
            raise UserError(f"{name} is {text}, expected a number from {least}")
        return value
    if name == "columns":
        asked = [word for word in text.split(",") if word]
        if unknown := [word for word in asked if word not in COLUMN_DTYPES or word == "phase"]:
            known = ", ".join(column for column in COLUMN_DTYPES if column != "phase")
            raise UserError(f"columns has {unknown[0]}, expected some of {known}")
        return tuple(column for column in COLUMN_DTYPES if column in asked)
    if name == "lengths" and text not in LENGTHS and not Path(text).is_file():
        raise UserError(f"lengths is {text}, expected {', '.join(LENGTHS)} or a file of token counts")
    return text


def load(settings: Settings) -> tuple[Any, Any]:
    """The model on its device, and its tokenizer.  Raises UserError if they cannot be had."""
    try:
        import torch  # noqa: PLC0415
        from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415
    except ImportError as error:
        raise UserError(f"capture needs torch and transformers ({error}); install them, see README") from None
    device = settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"device is {device}, but torch sees no CUDA device; use device=cpu")
    where = str(MODEL) if settings.model == "demo" else settings.model
    auto: Any = AutoModelForCausalLM
    dtypes: dict[str, Any] = {"auto": "auto", "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
    try:
        tokenizer = AutoTokenizer.from_pretrained(where)
        model = auto.from_pretrained(where, dtype=dtypes[settings.dtype])
        tokenizer.model_max_length = 1 << 30  # texts are cut by max_prompt, no warning is needed
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"cannot load {where}: {' '.join(str(error).split())[:200]}") from None
    if device == "cpu" and model.config.get_text_config().hidden_size <= SMALL_HIDDEN:
        torch.set_num_threads(1)
    return model.to(device).eval(), tokenizer


def capture(settings: Settings, model: Any, tokenizer: Any) -> list[str]:
    """Decode and write the trace; returns lines for the user."""
    import torch  # noqa: PLC0415
    from tqdm import tqdm  # noqa: PLC0415

    from traces.hooks import RouterHooks, find_moe_layers, kind_of_scores, norms_differ  # noqa: PLC0415

    prompts, said = choose_prompts(settings, model, tokenizer)
    if not norms_differ(find_moe_layers(model)) and {*NEXT_NORM_SCORES} & {*settings.columns}:
        said.append("left out next_norm_scores_1 to 3: this model's routers have a norm of their own")
        settings = replace(settings, columns=tuple(c for c in settings.columns if c not in NEXT_NORM_SCORES))
    steps = _steps(settings, prompts)
    name = "demo" if settings.model == "demo" else Path(settings.model).resolve().name
    hooks = RouterHooks(
        model,
        distance=_farthest(NEXT_SCORES, settings.columns),
        norm_distance=_farthest(NEXT_NORM_SCORES, settings.columns),
        hidden="hidden" in settings.columns,
    )
    out = Path(settings.out)
    plan = {field.name: getattr(settings, field.name) for field in fields(Settings) if field.name != "overwrite"}
    plan |= {"version": VERSION, "prompts": [prompt.label for prompt in prompts]}
    spool = Spool(out.with_name(f"{out.name}.parts"), plan)
    bar = tqdm(total=sum(steps), unit="token", disable=None)
    with torch.inference_mode(), hooks:
        model(input_ids=torch.tensor([[prompts[0].tokens[0]]], device=model.device), use_cache=False)
        gates = hooks.take()
        spec = ModelSpec(name, len(hooks.layers), _experts(gates), gates.ids.shape[-1])
        for first in range(0, len(prompts), settings.batch):
            numbers = range(first, min(first + settings.batch, len(prompts)))
            if all(spool.finished(number) for number in numbers):
                bar.update(sum(steps[number] for number in numbers))
            else:
                jobs = {number: (prompts[number], steps[number]) for number in numbers}
                _batch(settings, jobs, spool, bar, model=model, hooks=hooks)
        notes = {
            "dataset": settings.dataset,
            "path": Path(settings.path).name,
            "temperature": settings.temperature,
            "lengths": settings.lengths if settings.lengths in LENGTHS else Path(settings.lengths).name,
            "dtype": str(model.dtype).removeprefix("torch."),
            "scores": kind_of_scores(hooks.layers[0].router, gates),
        }
    bar.close()
    tokens = spool.write(
        out,
        spec,
        len(prompts),
        source=f"{name} on {settings.dataset} {Path(settings.path).name}",
        seed=settings.seed,
        layer_indices=tuple(layer.index for layer in hooks.layers),
        notes=notes,
    )
    spool.remove()
    size = out.stat().st_size
    return [*said, f"wrote    {out} ({size:,} bytes): {len(prompts)} requests, {tokens} tokens of {name}"]


def _farthest(names: Sequence[str], columns: Sequence[str]) -> int:
    """How many layers ahead the columns look."""
    return max((at for at, name in enumerate(names, 1) if name in columns), default=0)


def _experts(gates: Any) -> int:
    experts: int = gates.scores.shape[-1]
    return experts


def _batch(
    settings: Settings,
    jobs: Mapping[int, tuple[Prompt, int]],
    spool: Spool,
    bar: Any,
    *,
    model: Any,
    hooks: RouterHooks,
) -> None:
    from traces.decode import Request, decode  # noqa: PLC0415

    stops = _stops(model) if settings.lengths == "model" else frozenset()
    requests = [
        Request(number, prompt.tokens, steps, stops, settings.seed, settings.temperature)
        for number, (prompt, steps) in jobs.items()
    ]
    shapes: dict[str, list[int]] = {}

    def give(number: int, rows: Mapping[str, Array]) -> None:
        shapes.update({name: list(values.shape[1:]) for name, values in rows.items()})
        spool.append(number, rows)

    for number in jobs:
        spool.begin(number)
    for advanced in decode(model, hooks, requests, give, columns=settings.columns, prefill=settings.prefill):
        bar.update(advanced)
    for request in requests:
        prompt = jobs[request.number][0]
        bar.update(request.steps - request.fed)
        spool.finish(
            request.number,
            {
                "tokens": request.fed + (len(prompt.tokens) if settings.prefill else 0),
                "prompt_tokens": len(prompt.tokens),
                "arrival_s": prompt.arrival_s,
                "label": prompt.label,
                "shapes": shapes,
            },
        )


def _stops(model: Any) -> frozenset[int]:
    stops = getattr(model.generation_config, "eos_token_id", None)
    stops = model.config.get_text_config().eos_token_id if stops is None else stops
    return frozenset([stops] if isinstance(stops, int) else stops or ())


def _steps(settings: Settings, prompts: Sequence[Prompt]) -> list[int]:
    """Decode tokens of each request, at most."""
    if settings.lengths in ("model", "full"):
        return [settings.steps] * len(prompts)
    return [min(settings.steps, prompt.answer_tokens or settings.steps) for prompt in prompts]


def choose_prompts(settings: Settings, model: Any, tokenizer: Any) -> tuple[list[Prompt], list[str]]:
    """The prompts that are captured, and lines that say what was kept and dropped."""
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 30
    if settings.steps >= context:
        raise UserError(f"steps is {settings.steps}, but the model's context is {context} tokens; lower steps")
    limits = Limits(most_prompt=min(settings.max_prompt, context - settings.steps), cut=settings.cut)
    encode = Tokenizer(lambda text: list(tokenizer.encode(text, add_special_tokens=False)), _renderer(tokenizer))
    prompts, read, fitted = select(
        lambda tally: READERS[settings.dataset](settings.path, tally),
        settings.requests,
        settings.seed,
        encode,
        limits=limits,
        repeat=settings.repeat,
    )
    said = read.summary() + [f"passed   {n} {why}" for why, n in sorted(fitted.dropped.items())]
    if settings.lengths not in LENGTHS:
        tally = Tally()
        asked = list(read_lengths(settings.lengths, tally))[: len(prompts)]
        if len(asked) < len(prompts):
            raise UserError(f"{settings.lengths} has lengths of {len(asked)} requests, {len(prompts)} were asked for")
        prompts = [
            replace(p, tokens=p.tokens[: a.prompt_tokens], answer_tokens=a.answer_tokens, arrival_s=a.arrival_s)
            for p, a in zip(prompts, asked, strict=True)
        ]
    return prompts, said


def _renderer(tokenizer: Any) -> Callable[[Sequence[Message]], str]:
    """The tokenizer's own chat template; without one, the messages as paragraphs."""
    if not getattr(tokenizer, "chat_template", None):
        return lambda messages: "\n\n".join(message["content"] for message in messages)

    def render(messages: Sequence[Message]) -> str:
        import jinja2  # noqa: PLC0415

        try:
            text: str = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except jinja2.TemplateError:  # the template knows no system message: it goes before the first question
            head, *rest = messages
            joined = {"role": rest[0]["role"], "content": f"{head['content']}\n\n{rest[0]['content']}"}
            text = tokenizer.apply_chat_template([joined, *rest[1:]], tokenize=False, add_generation_prompt=True)
        return text

    return render


if __name__ == "__main__":
    raise SystemExit(run(main, __doc__))
