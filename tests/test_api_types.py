"""What type checkers make of the package: a user's program passes, and each wrong line of another is an error.

The programs lie in tests/api; none of them is run.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HOME = Path(__file__).parent.parent
PROGRAMS = Path(__file__).parent / "api"
GOOD, WRONG = PROGRAMS / "user_program.py", PROGRAMS / "wrong_program.py"

Found = set[tuple[str, int]]
"""The file and the line of each error."""


def mypy(cache: Path) -> Found:
    """The errors that mypy --strict finds; what it thinks of the package itself is left to `make lint`."""
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
    """The errors that pyright finds in its standard mode, as basedpyright brings it to where npm is not."""
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


def test_the_package_says_that_it_is_typed() -> None:
    assert (HOME / "onnxgrad_cli" / "py.typed").is_file()
