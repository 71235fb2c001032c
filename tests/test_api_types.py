"""Type checkers accept a user's program, and report an error in each wrong line of another program.

The programs are in tests/api. They are not run.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import onnxgrad_cli

HOME = Path(__file__).parent.parent
PROGRAMS = Path(__file__).parent / "api"
GOOD, WRONG = PROGRAMS / "user_program.py", PROGRAMS / "wrong_program.py"

Found = set[tuple[str, int]]
"""The file and the line of each error."""


def mypy(cache: Path) -> Found:
    """Return the errors that mypy --strict reports in the programs. `make lint` checks the package itself."""
    pytest.importorskip("mypy", reason="a tool of `make lint`")
    options = ["--config-file=", "--strict", "--follow-imports=silent", f"--cache-dir={cache}", "--no-error-summary"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(GOOD), str(WRONG)],
        cwd=HOME, env={**os.environ, "MYPYPATH": str(HOME)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    lines = [re.match(r"(?:.*/)?([\w.]+):(\d+): error", line) for line in done.stdout.splitlines()]
    return {(line[1], int(line[2])) for line in lines if line}


def pyright(folder: Path) -> Found:
    """Return the errors that pyright reports in its standard mode. basedpyright contains it and doesn't need npm."""
    pytest.importorskip("basedpyright", reason="a tool of `make lint`")
    settings = {"include": [str(PROGRAMS)], "typeCheckingMode": "standard", "extraPaths": [str(HOME)]}
    config = folder / "pyrightconfig.json"
    config.write_text(json.dumps(settings))
    done = subprocess.run(
        [sys.executable, "-m", "basedpyright", "-p", str(config), "--pythonpath", sys.executable, "--outputjson"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = json.loads(done.stdout)["generalDiagnostics"]
    return {
        (Path(each["file"]).name, each["range"]["start"]["line"] + 1) for each in found if each["severity"] == "error"
    }


@pytest.mark.slow
@pytest.mark.parametrize("checker", [mypy, pyright], ids=["mypy", "pyright"])
def test_a_users_program_passes_and_a_wrong_one_does_not(checker: Callable[[Path], Found], tmp_path: Path) -> None:
    lines = WRONG.read_text().splitlines()
    wrong = {(WRONG.name, number) for number, line in enumerate(lines, 1) if line.endswith("# wrong")}
    assert len(wrong) > 15
    assert checker(tmp_path) == wrong


def test_the_users_program_imports_each_public_name_and_uses_it() -> None:
    tree = ast.parse(GOOD.read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "onnxgrad_cli"]
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert {alias.name for node in imports for alias in node.names} == set(onnxgrad_cli.__all__) <= used


def test_the_package_says_that_it_is_typed() -> None:
    assert (HOME / "onnxgrad_cli" / "py.typed").is_file()
