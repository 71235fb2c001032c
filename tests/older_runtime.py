"""Create an environment with onnxruntime-training, whose last version 1.19.2 requires older packages than onnxgrad.

The variable ONNXGRAD_TRAINING_PYTHON can name its Python. Otherwise the environment is created in build/training-agent.
`made` also creates the environments of other runtimes.
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
    """Raised if an environment can't be created. The message has the reason."""


def python() -> str:
    """Return the Python of the environment, and create the environment if it doesn't exist.

    Raises:
        Absent: the environment can't be created on this machine.
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
    """Return the Python of an environment with packages. If it doesn't exist, one process creates it, and others wait.

    Raises:
        Absent: the environment can't be created.
    """
    import fcntl  # only exists on Unix

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
