"""Packages that are missing are named, with the extra that installs them."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import requires
from pathlib import Path

from onnxgrad_cli.common.packages import REQUIREMENTS

ROOT = Path(__file__).parents[2]


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


MODULES = {"markdown_it_py": "markdown_it", "protobuf": "google"}
"""Distribution -> its module, if that has another name."""


def distribution(requirement: str) -> str:
    return re.split(r"[<>=!~;\[ ]", requirement)[0].lower().replace("-", "_")


def test_every_import_is_of_a_dependency_or_of_a_package_that_is_named() -> None:
    declared = {distribution(each) for each in PROJECT["dependencies"]}
    declared |= {distribution(each) for each in requires("onnx") or () if "extra" not in each}
    modules = {MODULES.get(name, name) for name in declared}
    for path in (ROOT / "onnxgrad_cli").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"onnxgrad_cli"}:
                assert name in modules | REQUIREMENTS.keys(), f"{path} imports {name}"


def test_the_packages_that_hints_name_are_those_of_the_extras() -> None:
    listed = {each for group in PROJECT["optional-dependencies"].values() for each in group}
    assert set(REQUIREMENTS.values()) <= listed
