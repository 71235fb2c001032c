"""Tests don't use private names of the package. They use public names, or check results from outside."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PACKAGE = "onnxgrad_cli"
HIDDEN = re.compile(r"\b_(?!_\w+__\b)\w")
"""A name with a leading underscore. Files without such a name are not parsed, to save time."""


def private(source: str) -> Iterator[str]:
    """Yield each use of a private name that is imported from the package, or is an attribute of an imported object."""
    if not HIDDEN.search(source):
        return
    nodes = list(ast.walk(ast.parse(source)))
    ours: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
            for alias in node.names:
                ours.add(alias.asname or alias.name)
                if _hidden(alias.name) or any(map(_hidden, (node.module or "").split("."))):
                    yield f"line {node.lineno}: from {node.module} import {alias.name}"
        elif isinstance(node, ast.Import):
            ours |= {alias.asname or PACKAGE for alias in node.names if alias.name.split(".")[0] == PACKAGE}
    for _ in range(2):  # follow two assignments: `trainer = Trainer(...)`, then `step = trainer.step`
        for node in nodes:
            if isinstance(node, ast.Assign) and _root(node.value) in ours:
                ours |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    for node in nodes:
        if isinstance(node, ast.Attribute) and _hidden(node.attr) and _root(node.value) not in ("self", "cls"):
            if _root(node) in ours:
                yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr":
            name = node.args[1] if len(node.args) > 1 else None
            if isinstance(name, ast.Constant) and _hidden(str(name.value)) and _root(node.args[0]) in ours:
                yield f"line {node.lineno}: {ast.unparse(node)[:80]}"


def _hidden(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def _root(node: ast.expr) -> str | None:
    """Return the name at the start of a chain of attributes, calls and subscripts."""
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute | ast.Subscript | ast.Starred | ast.Await):
            node = node.value
        elif isinstance(node, ast.Call):
            node = node.func
        else:
            return None
    return node.id


@pytest.mark.parametrize(
    "source",
    [
        "from onnxgrad_cli.targets.blocked_channels import _BODIES",
        "from onnxgrad_cli.targets import blocked_channels\nblocked_channels._BODIES.clear()",
        "import onnxgrad_cli.targets.blocked_channels as blocked\nprint(blocked._function('x'))",
        "import onnxgrad_cli\nonnxgrad_cli.builder._build()",
        "from onnxgrad_cli import Trainer\ntrainer = Trainer('x')\nassert trainer._step",
        "from onnxgrad_cli import Trainer\nassert Trainer('x')._step.value",
        "from onnxgrad_cli import files\nmonkeypatch.setattr(files, '_write', print)",
    ],
)
def test_a_reach_inside_is_seen(source: str) -> None:
    assert list(private(source))


def test_no_test_reaches_inside() -> None:
    found = {
        f"{file.relative_to(TESTS)}, {each}"
        for file in sorted(TESTS.rglob("*.py"))
        for each in private(file.read_text())
    }
    assert not found
