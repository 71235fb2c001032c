"""An environment with onnxruntime-training, which ended at 1.19.2 and wants older packages than ours.

Its Python is named by ONNXGRAD_TRAINING_PYTHON, or the environment is made in build/training-agent. Other runtimes
that need an environment of their own are made the same way.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
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
    return made("onnxruntime-training 1.19.2", base, FOLDER, PACKAGES)


def made(what: str, base: str, folder: Path, packages: Sequence[str]) -> str:
    """The Python of an environment with these packages: one process of several makes it, the others wait.

    Raises:
        Absent: it can't be made.
    """
    import fcntl  # there is none but on Unix

    folder.mkdir(parents=True, exist_ok=True)
    found, installed = folder / "bin" / "python", folder / "installed"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for command in ((base, "-m", "venv", folder), (found, "-m", "pip", "install", *packages)):
            done = None if installed.exists() else subprocess.run(command, capture_output=True, text=True)
            if done and done.returncode:
                reason = (done.stderr or done.stdout).strip().splitlines()[-1]
                raise Absent(f"{what} can't be installed: {reason}")
        installed.touch()
    return str(found)
