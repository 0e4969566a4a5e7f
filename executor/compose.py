"""From a command line to the settings of runs on this machine: the executor's options on top of ``conf``.

Owns the extra search path and the overrides that every command line here begins with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from conf.cells import check, resolved
from conf.compose import composing, expand
from executor.pack_model import register_resolver
from executor.shipped import with_shipped_pack
from policies.core.journal import read_journal
from policies.core.types import UserError

OPTIONS = Path(__file__).resolve().parent / "options"

OF_JOURNAL = ("system", "schedule", "cache", "prefetch", "workload", "concurrency", "steps", "warmup", "seed", "strict")
"""What a replay takes from the journal's own config, whatever the command line says."""


_LIVE = {"workload": "prompts", "warmup": "4"}
"""What a live run is unless its command line says otherwise."""


def overrides_for(arguments: Sequence[str], more: Path | None = None) -> list[str]:
    """The full override list of a command line.  ``more``: a folder with further options."""
    register_resolver()
    arguments = with_shipped_pack(arguments)
    if more is not None and not more.is_dir():
        raise UserError(f"--config-dir {more} is no folder; give one that holds folders such as cache/ or system/")
    folders = [OPTIONS, *([more.resolve()] if more else [])]
    given = {argument.lstrip("+~").split("=", 1)[0] for argument in arguments}
    extra = [] if "experiment" in given else ["~experiment"]
    if "mode=live" in arguments:
        extra += [f"{key}={value}" for key, value in _LIVE.items() if key not in given]
    paths = ",".join(f"'file://{folder}'" for folder in folders)
    # One worker: two runs at one time would measure each other.
    return [f"hydra.searchpath=[{paths}]", "+executor=machine", *extra, *arguments, "workers=1"]


def settings_of(arguments: Sequence[str], more: Path | None = None) -> Iterator[dict[str, Any]]:
    """The checked settings of every cell that a command line describes.  Raises UserError."""
    with composing():
        for point in expand(overrides_for(arguments, more)):
            settings = resolved(point.config)
            check(settings)
            yield settings


def replay_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a replay: the machine's own, and from the journal all that decides.

    Raises UserError if the journal cannot be read.
    """
    header, _ = read_journal(Path(str(settings["journal"])))
    config = header.get("config")
    if not isinstance(config, Mapping) or any(key not in config for key in OF_JOURNAL):
        raise UserError(f"{settings['journal']} does not say how it was run; give the journal.jsonl.gz of a run folder")
    return {**settings, **{key: config[key] for key in OF_JOURNAL}, "fetch_slots": _fetch_slots(config)}


def _fetch_slots(config: Mapping[str, Any]) -> int:
    """Reads that the core of a recorded run had in flight: a machine's setting, or its simulated device's."""
    link = config["device"].get("link")
    if link is None:
        return int(config.get("fetch_slots") or config["readers"])
    return int(link["readers"]["value"]) // int(link["read_splits"]["value"])
