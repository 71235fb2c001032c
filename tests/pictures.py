"""docs/pictures.md holds what its own commands print: `python -m tests.pictures` runs them and writes it anew."""

from __future__ import annotations

import io
import re
import shlex
import shutil
import tempfile
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path

from onnxgrad_cli.cli import run

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "pictures.md"
EXAMPLE = re.compile(r"```sh\n(.*?)```\n\n```mermaid\n(.*?)```", re.DOTALL)


def fresh(page: str) -> str:
    """The page with each picture as the commands above it draw it now; a later command sees the earlier files."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        shutil.copytree(ROOT / "sample_models", "sample_models")
        return EXAMPLE.sub(lambda found: f"```sh\n{found[1]}```\n\n```mermaid\n{_last(found[1].splitlines())}```", page)


def _last(commands: list[str]) -> str:
    for command in commands:
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = run(shlex.split(command)[1:])
        assert code == 0, f"{command}: {err.getvalue()}"
    return out.getvalue()


if __name__ == "__main__":
    PAGE.write_text(fresh(PAGE.read_text()))
