"""An environment with onnxruntime-training, which ended at 1.19.2 and wants older packages than ours.

Its Python is named by ONNXGRAD_TRAINING_PYTHON, or the environment is made in build/training-agent.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "training-agent"
PACKAGES = ("onnxruntime-training-cpu==1.19.2", "onnx==1.16.2", "numpy<2")


class Absent(Exception):
    """There is no such environment; the message says why."""


def python() -> str:
    """The Python of the environment, which is made if it is not there yet.

    Raises:
        Absent: it can't be had here.
    """
    if given := os.environ.get("ONNXGRAD_TRAINING_PYTHON"):
        return given
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise Absent("onnxruntime-training 1.19.2 is installed on x86-64 Linux only")
    base = sys.executable if sys.version_info[:2] == (3, 11) else shutil.which("python3.11")
    if base is None:
        raise Absent("onnxruntime-training 1.19.2 needs Python 3.11, and there is none; "
                     "ONNXGRAD_TRAINING_PYTHON may name a Python that has it")  # fmt: skip
    return _made(base)


def _made(base: str) -> str:
    """Make it: one process of several does, the others wait."""
    import fcntl  # there is none but on Unix

    FOLDER.mkdir(parents=True, exist_ok=True)
    found, installed = FOLDER / "bin" / "python", FOLDER / "installed"
    with open(FOLDER / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for command in ((base, "-m", "venv", FOLDER), (found, "-m", "pip", "install", *PACKAGES)):
            made = None if installed.exists() else subprocess.run(command, capture_output=True, text=True)
            if made and made.returncode:
                reason = (made.stderr or made.stdout).strip().splitlines()[-1]
                raise Absent(f"onnxruntime-training 1.19.2 can't be installed: {reason}")
        installed.touch()
    return str(found)
