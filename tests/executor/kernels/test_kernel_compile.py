"""Every kernel compiles for a GPU that is not here: type errors that the interpreter hides."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).resolve().parent
KERNELS = {
    "attention": {"_chunks", "_merge"},
    "delta": {"_convolve", "_recur"},
    "experts_float": {"_gate_up", "_down"},
    "experts_q4": {"_gate_up", "_down", "_combine"},
    "norm": {"_rms_norm"},
    "planes": {"_to_planes"},
    "rotary": {"_rotate_and_store"},
    "router": {"_route"},
}


@pytest.mark.slow
def test_every_kernel_compiles_for_an_h200(tmp_path):
    path = os.pathsep.join([str(HERE.parents[2]), str(HERE), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(HERE / "compile_ahead.py"), "90"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert set(done.stdout.split()) == {f"{module}.{name}" for module, names in KERNELS.items() for name in names}
