"""Shared fixtures: reference data that may be absent."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real routing traces kept beside the checkout; absent on a stranger's machine."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("real traces are not beside this checkout")
    return folder
