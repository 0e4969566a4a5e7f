"""Run directories: ``runs/<study>/<cell>/`` appears complete or not at all.

Owns the temporary folders, the rename that publishes them, and the records that every run has beside its
journal.  Knows nothing of what is measured.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

_FAILED = ".failed.json"
_PACKAGES = ("hydra-core", "numpy", "omegaconf", "pandas", "pyarrow", "simpy")


def is_finished(folder: Path) -> bool:
    """True if ``folder`` holds a complete run."""
    return read_summary(folder) is not None


def read_summary(folder: Path) -> dict[str, Any] | None:
    """The run's ``summary.json``; None if it is not there or not whole."""
    return read_json(folder / "summary.json")


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object; None if the file is not there or not whole."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


@contextmanager
def writing(folder: Path, *, replace: bool = False) -> Iterator[Path]:
    """A temporary sibling of ``folder`` to write a run into; it takes the name when the block ends well.

    Its name holds this host and process, so that no two processes share one.  If another process finished the
    same cell meanwhile, its directory stays and this one is dropped, unless ``replace``.
    """
    temporary = _temporary(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        _publish(temporary, folder, replace)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def copy(source: Path, folder: Path) -> None:
    """Make ``folder`` the same run as ``source``, instead of what was there."""
    with writing(folder, replace=True) as temporary:
        shutil.copytree(source, temporary, dirs_exist_ok=True)


@dataclass(frozen=True, slots=True)
class Look:
    """What one look at a study's folder shows, by the names of cells."""

    runs: dict[str, int]
    """Complete runs, and the number of their directory's inode, which tells a new run from the one it replaced."""
    started: set[str]
    failed: set[str]


def look(study: Path) -> Look:
    """One listing of ``study``, however many cells it has."""
    found = Look({}, set(), set())
    with os.scandir(study) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                found.started.add(entry.name[1:].split("@")[0])
            elif entry.name.endswith(_FAILED):
                found.failed.add(entry.name.removesuffix(_FAILED))
            else:
                found.runs[entry.name] = entry.inode()
    return found


def remove_stale(study: Path) -> None:
    """Delete what processes of this host that are dead now left unfinished."""
    for path in study.glob(".*@*@*"):
        _, host, process = path.name.rsplit("@", 2)
        number = process.removesuffix(".old")
        if host == _host() and number.isdigit() and not _is_alive(int(number)):
            shutil.rmtree(path, ignore_errors=True)


def failure_file(folder: Path) -> Path:
    """Where the reason stands why the run of ``folder`` failed."""
    return folder.with_name(folder.name + _FAILED)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write sorted JSON, whole or not at all."""
    unfinished = _temporary(path)
    unfinished.write_text(json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n")
    os.replace(unfinished, path)


def write_records(folder: Path, settings: Mapping[str, Any]) -> None:
    """``config.yaml`` and ``environment.json``: the same bytes on the same machine, whoever runs it."""
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(dict(settings))))
    write_json(folder / "environment.json", environment())


@lru_cache
def environment() -> dict[str, Any]:
    """What the run depends on beside its config: versions, platform, the state of the checkout."""
    return {
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "packages": {name: metadata.version(name) for name in _PACKAGES},
        "git": _checkout(),
    }


def _checkout() -> dict[str, Any] | None:
    root = Path(__file__).resolve().parents[1]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != root:
            return None
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _publish(temporary: Path, folder: Path, replace: bool) -> None:
    aside = temporary.with_name(f"{temporary.name}.old")
    while True:
        try:
            os.rename(temporary, folder)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        if is_finished(folder) and not replace:
            return
        # A directory cannot be renamed onto one that is not empty: the old one steps aside first.
        with suppress(FileNotFoundError):
            os.rename(folder, aside)
        shutil.rmtree(aside, ignore_errors=True)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}@{_host()}@{os.getpid()}")


@lru_cache
def _host() -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "_", socket.gethostname())[:60]


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    # In a container nobody may collect a killed process: it keeps its number and is dead all the same.
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return True
