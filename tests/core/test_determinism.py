"""The same decisions under any hash seed."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
PROGRAM = """
import sys, pathlib
sys.path[:0] = [{here!r}, {root!r}]
from test_journal import NAMES, record
for name in NAMES:
    for prefetch in (False, True):
        sys.stdout.buffer.write(record(pathlib.Path(sys.argv[1]) / "j", name, prefetch).read_bytes())
"""


@pytest.fixture(scope="module")
def journals(tmp_path_factory):
    def digest(seed):
        program = PROGRAM.format(here=str(HERE), root=str(HERE.parents[1]))
        folder = tmp_path_factory.mktemp("journals")
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        run = subprocess.run([sys.executable, "-c", program, folder], env=environment, capture_output=True, check=True)
        return hashlib.sha256(run.stdout).hexdigest()

    return digest


def test_journals_do_not_depend_on_the_hash_seed(journals):
    assert journals("0") == journals("1") == journals("random")
