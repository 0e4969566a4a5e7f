"""The dependency rule: which folder may import which."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = {"policies", "traces", "sim", "executor", "analysis", "conf"}
MAY_IMPORT = {
    "policies": {"policies"},
    "traces": {"policies", "traces", "conf"},
    "conf": {"policies", "conf"},
    "sim": {"policies", "traces", "conf", "sim"},
    "executor": {"policies", "traces", "conf", "executor"},
    "analysis": {"policies", "traces", "conf", "sim", "executor", "analysis"},
}
# Commands put the parts together; nothing imports them.
COMMANDS = {"sim/__main__.py", "sim/search.py", "executor/__main__.py", "executor/bench.py", "traces/info.py"}

# To record routing from a model, or to train one, is the one business outside the executor that runs a model.
RUN_A_MODEL = {"traces/capture.py", "traces/hooks.py", "traces/decode.py", "traces/demo/train.py"}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


def sources(folder):
    return sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("folder", sorted(OURS))
def test_a_folder_imports_only_what_lies_below_it(folder):
    for path in sources(folder):
        if path.relative_to(ROOT).as_posix() in COMMANDS:
            continue
        ours = {name.split(".")[0] for name in imports(path)} & OURS
        assert ours <= MAY_IMPORT[folder], f"{path} imports {ours - MAY_IMPORT[folder]}"


def test_the_core_needs_the_standard_library_only():
    for path in sources("policies/core"):
        for name in imports(path):
            assert name.split(".")[0] in sys.stdlib_module_names or name.startswith("policies.core"), f"{path}: {name}"


def test_nothing_but_the_executor_and_capture_needs_torch():
    for folder in OURS - {"executor"}:
        for path in sources(folder):
            names = set(imports(path))
            name = path.relative_to(ROOT).as_posix()
            if name in RUN_A_MODEL:
                continue
            assert not {"torch", "triton", "transformers"} & {name.split(".")[0] for name in names}, path
            assert not {other.removesuffix(".py").replace("/", ".") for other in RUN_A_MODEL} & names, path


def test_only_build_instantiates_policies():
    for path in sources("policies"):
        if path.name != "build.py":
            assert not any(name.startswith(("hydra", "omegaconf")) for name in imports(path)), path
