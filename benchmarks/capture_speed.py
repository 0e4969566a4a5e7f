"""What capture costs beside plain generation, and whether its memory depends on the number of steps.

    python -m benchmarks.capture_speed [text=policies] [steps=64] [batch=8] [rounds=5] [memory_steps=128]

speed     transformers' ``generate`` and ``traces.capture`` (all default columns, to a file) decode the same prompts
          with the demo model, in turns in one process: tokens/s of the process's CPU time, and the ratio of each round.
          Target: at least 0.5
columns   the same for the expert ids alone
memory    largest resident memory of ``python -m traces.capture`` with memory_steps and four times as many; 0 leaves it
          out.  Target: flat
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from traces.capture import Settings, capture, choose_prompts, load

MEASURED = (
    "import re, sys\nfrom traces.capture import main\nmain(sys.argv[1:])\n"
    "print('peak', re.search(r'VmHWM:\\s*(\\d+) kB', open('/proc/self/status').read())[1])"
)


def timed(work: Callable[[], object]) -> float:
    began_s = time.process_time()
    work()
    return time.process_time() - began_s


def speed(settings: Settings, rounds: int, folder: Path) -> None:
    model, tokenizer = load(settings)
    prompts, _ = choose_prompts(settings, model, tokenizer)
    longest = max(len(prompt.tokens) for prompt in prompts)
    padded = [[256] * (longest - len(prompt.tokens)) + list(prompt.tokens) for prompt in prompts]
    seen = [[0] * (longest - len(prompt.tokens)) + [1] * len(prompt.tokens) for prompt in prompts]
    inputs = {"input_ids": torch.tensor(padded), "attention_mask": torch.tensor(seen)}

    def plain() -> Any:
        with torch.inference_mode():
            return model.generate(
                **inputs, do_sample=False, min_new_tokens=settings.steps, max_new_tokens=settings.steps
            )

    def captured(columns: tuple[str, ...]) -> None:
        out = folder / "trace.parquet"
        out.unlink(missing_ok=True)
        capture(replace(settings, columns=columns, out=str(out)), model, tokenizer)

    kinds = {"all columns": settings.columns, "ids alone": ()}
    plain()
    times: dict[str, list[float]] = {name: [] for name in ("plain", *kinds)}
    for _ in range(rounds):
        times["plain"].append(timed(plain))
        for name, columns in kinds.items():
            times[name].append(timed(lambda columns=columns: captured(columns)))
    tokens = settings.requests * settings.steps
    print(f"plain generation    {tokens / statistics.median(times['plain']):7.1f} tokens/s of CPU time")
    for name in kinds:
        ratios = sorted(a / b for a, b in zip(times["plain"], times[name], strict=True))
        rate = tokens / statistics.median(times[name])
        print(
            f"capture, {name:<11}{rate:7.1f} tokens/s, {statistics.median(ratios):.2f}x plain "
            f"({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )


def memory(settings: Settings, steps: int, folder: Path) -> None:
    for count in (steps, 4 * steps):
        words = [f"model={settings.model}", "dataset=text", f"path={settings.path}", "lengths=full", "max_prompt=256"]
        words += [f"requests={settings.requests}", f"batch={settings.batch}", f"steps={count}"]
        words += [f"out={folder / f'{count}.parquet'}"]
        run = subprocess.run([sys.executable, "-c", MEASURED, *words], capture_output=True, text=True, check=True)
        size = (folder / f"{count}.parquet").stat().st_size
        peak = int(run.stdout.split()[-1]) / 1024
        print(f"memory, {count:4} steps   {peak:7.0f} MiB, a trace of {size / 1e6:.1f} MB")


def main() -> None:
    given = {"text": "policies", "steps": "64", "batch": "8", "rounds": "5", "memory_steps": "128"}
    given |= dict(word.split("=", 1) for word in sys.argv[1:])
    batch = int(given["batch"])
    print(f"load {os.getloadavg()[0]:.1f}, demo model, {batch} requests together")
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(
            "demo", "text", given["text"], "", requests=batch, batch=batch, steps=int(given["steps"]), lengths="full",
            max_prompt=256, device="cpu",
        )  # fmt: skip
        speed(settings, int(given["rounds"]), Path(folder))
        if steps := int(given["memory_steps"]):
            memory(settings, steps, Path(folder))


if __name__ == "__main__":
    main()
