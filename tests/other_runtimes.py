"""Environments with other runtimes than the package onnxruntime: OpenVINO, and onnxruntime with OpenVINO's provider.

The latter package also installs a module `onnxruntime`, so the two can't share an environment. A variable can name the
Python of each environment. Otherwise the environment is created in the folder build.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.older_runtime import ROOT, Absent, made


@dataclass(frozen=True)
class Runtime:
    """A runtime: its package, the variable that can name a Python with it, and the folder of its environment."""

    package: str
    variable: str
    folder: Path

    def python(self) -> str:
        """Return the Python of the environment, and create the environment if it doesn't exist.

        Raises:
            Absent: the environment can't be created on this machine.
        """
        if given := os.environ.get(self.variable):
            return given
        if sys.platform == "win32":
            raise Absent(f"environments are made on Unix; {self.variable} may name a Python that has {self.package}")
        return made(self.package, sys.executable, self.folder, (self.package, "onnx", "numpy", "safetensors"))

    def ready(self) -> str | None:
        """Return the Python of the environment, or None if the environment doesn't exist yet."""
        return self.python() if os.environ.get(self.variable) or (self.folder / "installed").exists() else None


OPENVINO = Runtime("openvino", "ONNXGRAD_OPENVINO_PYTHON", ROOT / "build" / "openvino")
PROVIDER = Runtime("onnxruntime-openvino", "ONNXGRAD_OPENVINO_PROVIDER_PYTHON", ROOT / "build" / "openvino-provider")
