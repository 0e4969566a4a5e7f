"""Where a file lies that a configuration names.

Options that come along name files of the checkout by paths from its root, so that the recorded settings of a run are
the same on every machine; a command may be started anywhere.
"""

from __future__ import annotations

import os.path
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def located(path: str | Path) -> Path:
    """``path`` as seen from the current folder; if nothing is there, as seen from the project's root, if it is there.

    A path that leads to nothing comes back as it is, for an error that names what was given.
    """
    if not os.path.exists(path) and os.path.exists(ROOT / path):
        return ROOT / path
    return Path(path)
