"""A plain `pip install .` runs the commands, and every other package is named with the command that installs it."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest

from onnxgrad_cli.common.packages import REQUIREMENTS
from tests.older_runtime import Absent, made

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
COMMANDS = (
    "train MODEL --loss cross-entropy --label y --data DATA --prefix train_ --val DATA --val-prefix test_ --epochs 1 "
    "--log csv --picture p.html -o trained.onnx",
    "evaluate trained.onnx --loss cross-entropy --label y --data DATA --prefix test_",
    "predict trained.onnx --data DATA --prefix test_ -o predictions.npz",
    "export trained.onnx.run/checkpoint.safetensors --model MODEL -o exported.onnx",
    "train MODEL --loss cross-entropy --label y --data DATA --prefix train_ --lora 2 --adapter adapter.safetensors "
    "--epochs 1 -o lora.onnx",
)


def distribution(requirement: str) -> str:
    return re.split(r"[<>=!~;\[ ]", requirement)[0].lower().replace("-", "_")


def test_every_import_is_of_a_dependency_or_of_a_package_that_is_named() -> None:
    declared = {distribution(each) for each in PROJECT["dependencies"]}
    declared |= {distribution(each) for each in requires("onnx") or () if "extra" not in each}
    for path in (ROOT / "onnxgrad_cli").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"onnxgrad_cli"}:
                assert name in declared | {"google"} | REQUIREMENTS.keys(), f"{path} imports {name}"


def test_the_packages_that_hints_name_are_those_of_the_extras() -> None:
    listed = {each for group in PROJECT["optional-dependencies"].values() for each in group}
    assert set(REQUIREMENTS.values()) <= listed


BLOCKED = """
import sys
from importlib.abc import MetaPathFinder

class Absent(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {modules!r}:
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Absent())
from onnxgrad_cli.__main__ import main
main()
"""


def run_commands(program: list[str], folder: Path) -> None:
    """Run `COMMANDS` on a sample, in a process each."""
    samples = ROOT / "sample_models"
    for command in COMMANDS:
        words = command.replace("MODEL", str(samples / "digits_cnn.onnx")).replace("DATA", str(samples / "digits.npz"))
        done = subprocess.run([*program, *words.split()], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert (folder / "exported.onnx").exists() and (folder / "predictions.npz").exists()


@pytest.mark.slow
def test_the_commands_run_without_optional_packages(tmp_path: Path) -> None:
    modules = {*REQUIREMENTS, "llvmlite"}
    run_commands([sys.executable, "-c", BLOCKED.format(modules=modules)], tmp_path)


@pytest.mark.slow
@pytest.mark.skipif("ONNXGRAD_OFFLINE" in os.environ, reason="ONNXGRAD_OFFLINE is set: nothing is downloaded")
def test_a_plain_installation_runs_the_commands(tmp_path: Path) -> None:
    try:
        python = Path(made("onnxgrad", sys.executable, tmp_path / "plain", (str(ROOT),)))
    except Absent as absent:
        pytest.skip(str(absent))
    run_commands([str(python.with_name("onnxgrad"))], tmp_path)
