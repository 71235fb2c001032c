"""Environments with stock runtimes besides the package onnxruntime: OpenVINO, and onnxruntime with its provider.

The second has onnxruntime's name and so can't stand beside it. A variable names the Python that has one, or the
environment is made in build.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.older_runtime import ROOT, Absent, made


@dataclass(frozen=True)
class Runtime:
    """A runtime: its package, the variable that may name a Python which has it, and the folder of its environment."""

    package: str
    variable: str
    folder: Path

    def python(self) -> str:
        """The Python of the environment, which is made if it is not there yet.

        Raises:
            Absent: it can't be had here.
        """
        if given := os.environ.get(self.variable):
            return given
        if sys.platform == "win32":
            raise Absent(f"environments are made on Unix; {self.variable} may name a Python that has {self.package}")
        return made(self.package, sys.executable, self.folder, (self.package, "onnx", "numpy", "safetensors"))

    def ready(self) -> str | None:
        """The Python, where nothing need be installed first."""
        return self.python() if os.environ.get(self.variable) or (self.folder / "installed").exists() else None


OPENVINO = Runtime("openvino", "ONNXGRAD_OPENVINO_PYTHON", ROOT / "build" / "openvino")
PROVIDER = Runtime("onnxruntime-openvino", "ONNXGRAD_OPENVINO_PROVIDER_PYTHON", ROOT / "build" / "openvino-provider")
