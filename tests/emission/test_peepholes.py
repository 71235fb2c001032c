"""Operands of one element beside large ones that end in axes of size one, where onnxruntime is slow without an axis."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.type_inference import infer_types

WEIGHT = np.random.default_rng(0).uniform(0.5, 2, (64, 32, 1, 1)).astype(np.float32)
SHAPES = {"x": "[64, 32, 1, 1]", "rate": "", "one": "[1]", "narrow": "[8, 32, 1, 1]"}


def written(write: Any) -> tuple[Op, onnx.ModelProto]:
    """What is written, and the model of it."""
    inputs = ", ".join(f"float{shape} {name}" for name, shape in SHAPES.items())
    head = '<ir_version: 10, opset_import: ["" : 18]>'
    graph = Graph(onnx.parser.parse_model(f"{head} g ({inputs}) => () {{}}"))
    infer_types(graph)
    op = Op(graph)
    result = write(op)
    graph.nodes.extend(op.nodes)
    graph.add_output(result.name, graph.types[result.name])
    return op, graph.commit()


@pytest.mark.parametrize("kind", ["Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "Less", "Equal", "GreaterOrEqual"])
@pytest.mark.parametrize("single", [0.7, "rate", "one"], ids=str)
@pytest.mark.parametrize("first", [False, True])
def test_a_single_element_gets_an_axis_before_the_last(kind: str, single: float | str, first: bool) -> None:
    def write(op: Op) -> Any:
        pair = [op.val("x"), op.val(single) if isinstance(single, str) else single]
        return op.emit(kind, *(pair[::-1] if first else pair))

    op, model = written(write)
    node = op.nodes[-1]
    assert op.val(node.input[0 if first else 1]).shape == (1, 1, 1)
    assert len(op.nodes) == 1 + isinstance(single, str), "a constant is stored with the axis"
    assert op.val(node.output[0]).shape == WEIGHT.shape
    feeds = {"x": WEIGHT, "rate": np.array(0.7, np.float32), "one": np.float32([0.7]), "narrow": WEIGHT[:8]}
    results = [Executor(model, executor)(feeds)[node.output[0]] for executor in ("onnxruntime", "reference")]
    function = {"Sub": "subtract", "Mul": "multiply", "Div": "divide", "Pow": "power", "Max": "maximum",
                "Min": "minimum", "GreaterOrEqual": "greater_equal"}.get(kind, kind.lower())  # fmt: skip
    pair = [WEIGHT, np.float32(0.7)]
    expected = getattr(np, function)(*(pair[::-1] if first else pair))
    for result in results:
        np.testing.assert_allclose(result, expected, rtol=1e-6)


def test_of_three_operands() -> None:
    op, _ = written(lambda op: op.Where(op.val("x") > 1.0, op.val("x"), op.const(0.0, op.val("x"))))
    assert [op.val(name).shape for name in op.nodes[-1].input] == [WEIGHT.shape, WEIGHT.shape, (1, 1, 1)]


def test_small_tensors_and_rows_are_left_alone() -> None:
    op, _ = written(lambda op: op.val("narrow") * op.val("rate"))
    assert list(op.nodes[-1].input) == ["narrow", "rate"]
    op, _ = written(lambda op: op.reshape(op.val("x"), [64, 32]) * op.val("rate"))
    assert op.nodes[-1].input[1] == "rate"
