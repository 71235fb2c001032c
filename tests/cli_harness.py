"""Helpers for tests of the command line: small models, and a shell that runs the command in this process."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, parser

from onnxgrad_cli.cli import run
from onnxgrad_cli.cli.terminal.console import Console
from onnxgrad_cli.cli.terminal.document import Problem
from tests.facts import facts

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
    """Write a model, given in ONNX's text format, to a file."""
    onnx.save(parser.parse_model(text), path)
    return path


def save_mlp_and_data() -> None:
    """Write mlp.onnx, and data.npz with 50 samples for it, into the working directory."""
    save(MLP, Path("mlp.onnx"))
    x = np.random.default_rng(0).standard_normal((50, 4)).astype(np.float32)
    np.savez("data.npz", x=x, label=np.stack([x.sum(1), x[:, 0]], 1))


def save_external(path: Path, location: str = "weights.bin", **entries: int) -> Path:
    """Write a model whose single weight, float32 [8, 3], refers to an external data file. The file is not written."""
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
"""Contents of the external data file that `save_external` refers to."""


@dataclass
class Result:
    """The exit code and the output of a command, and the problem if it failed."""

    code: int
    out: str
    err: str
    problem: Problem | None = None

    @property
    def facts(self) -> tuple[str, ...]:
        """The data of the problem; see `tests.facts`. Arguments have their names in Python. () after success."""
        return facts(self.problem, self.problem.refusals) if self.problem else ()

    @property
    def hint(self) -> str:
        """The hint of the problem, with arguments instead of flags; "" if there is none."""
        return (self.problem and self.problem.hint) or ""

    @property
    def document(self) -> dict[str, Any]:
        """The JSON document on stdout; see `cli.terminal.document`."""
        document: dict[str, Any] = json.loads(self.out)
        return document

    @property
    def json(self) -> Any:
        """The result in the JSON document."""
        return self.document["result"]


class Shell:
    """A shell that runs commands in this process, and the folder with their files."""

    def __init__(self, folder: Path, capture: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.capture = capture

    def __call__(self, *arguments: object) -> Result:
        """Run `onnxgrad` with the given arguments."""
        problems: list[Problem] = []
        failed = Console.failed

        def recorded(console: Console, problem: Problem) -> Problem:
            problems.append(problem)
            return failed(console, problem)

        self.capture.readouterr()
        with patch.object(Console, "failed", recorded):
            code = run([str(argument) for argument in arguments])
        return Result(code, *self.capture.readouterr(), problem=problems[-1] if problems else None)

    def files(self) -> dict[str, bytes]:
        """Return the path of every file in the folder -> its contents."""
        paths = (path for path in self.folder.rglob("*") if path.is_file())
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in paths}


PROGRAM = [sys.executable, "-m", "onnxgrad_cli"]
"""The words that start the command in a new process."""
