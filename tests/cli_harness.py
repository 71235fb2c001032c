"""What the tests of the command line share: small models, and a run of the command in this process."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, parser

from onnxgrad_cli.cli import run

MLP = """
<ir_version: 8, opset_import: ["": 17]>
mlp (float[batch, 4] x) => (float[batch, 2] y)
<float[4, 3] w1 = {1, -2, 3, 4, 5, -6, 7, 8, 9, -1, 2, 3}, float[3] b1 = {1, 2, 3}, float[3, 2] w2 = {1, 2, 3, 4, 5, 6}>
{
  h = MatMul(x, w1)
  k = Add(h, b1)
  s = Sigmoid(k)
  y = MatMul(s, w2)
}
"""

UNKNOWN_OPS = """
<ir_version: 8, opset_import: ["": 17, "my.ops": 1]>
unknown (float[batch, 4] x) => (float[batch, 4] y)
<float[4] b = {1, 2, 3, 4}>
{
  h = Add(x, b)
  k = my.ops.Twirl(h)
  y = my.ops.Swirl(k)
}
"""

INTEGERS = """
<ir_version: 8, opset_import: ["": 17]>
integers (int64[batch] x) => (int64[batch] y)
{
  y = Add(x, x)
}
"""

NO_WEIGHTS = """
<ir_version: 8, opset_import: ["": 17]>
bare (float[batch] x) => (float[batch] y)
{
  y = Sigmoid(x)
}
"""


def save(text: str, path: Path) -> Path:
    """Write the model of a text."""
    onnx.save(parser.parse_model(text), path)
    return path


def save_external(path: Path, location: str = "weights.bin", **entries: int) -> Path:
    """Write a model whose one weight, [8, 3] in float32, is said to lie in another file."""
    weight = TensorProto(name="w", dims=[8, 3], data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, **entries}.items():
        weight.external_data.add(key=key, value=str(value))
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3])
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "external", [x], [y], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.write_bytes(model.SerializeToString())
    return path


WEIGHT = np.arange(24, dtype=np.float32)
"""What lies in the file of `save_external`."""


@dataclass
class Result:
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """What stands on stdout, as JSON: see `cli.document`."""
        document: dict[str, Any] = json.loads(self.out)
        return document

    @property
    def json(self) -> Any:
        """The result in it."""
        return self.document["result"]


class Shell:
    """A folder in which commands run."""

    def __init__(self, folder: Path, capture: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.capture = capture

    def __call__(self, *arguments: object) -> Result:
        """Run `onnxgrad` with these arguments."""
        self.capture.readouterr()
        code = run([str(argument) for argument in arguments])
        return Result(code, *self.capture.readouterr())

    def files(self) -> dict[str, bytes]:
        """Every file in the folder, and what is in it."""
        paths = (path for path in self.folder.rglob("*") if path.is_file())
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in paths}


PROGRAM = [sys.executable, "-m", "onnxgrad_cli"]
"""The command, for a process of its own."""
