"""Commands that are known to be right, whose results are what is damaged."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def run(words: Sequence[str], place: Path) -> None:
    """Run a command in another process: this one is to be forked."""
    done = subprocess.run(
        [sys.executable, "-m", "onnxgrad_cli", *words], cwd=place, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{words}: {done.stdout} {done.stderr}"
