"""Sums over whole tensors: what numpy computes, in two steps where a sample is long, and in the widest type."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.sums import norm, reduced, total
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.type_inference import infer_types

RNG = np.random.default_rng(0)


def emitter(**inputs: str) -> Op:
    declared = ", ".join(f"{value_type} {name}" for name, value_type in inputs.items())
    graph = Graph(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> g ({declared}) => () {{}}'))
    infer_types(graph)
    return Op(graph)


def run(op: Op, result: Val, **feeds: np.ndarray) -> np.ndarray:
    op.graph.nodes.extend(op.nodes)
    op.graph.add_output(result.name, result.type)
    model = op.graph.commit()
    onnx.checker.check_model(model, full_check=True)
    (found,) = ReferenceEvaluator(model).run(None, feeds)
    assert onnx.helper.tensor_dtype_to_np_dtype(result.dtype) == found.dtype
    return found


KINDS = {"ReduceSum": np.sum, "ReduceMean": np.mean, "ReduceL1": lambda x: np.abs(x).sum(),
         "ReduceSumSquare": lambda x: (x * x).sum()}  # fmt: skip
SECOND = {"ReduceMean": "ReduceMean"}
"""What follows where samples are reduced first; for the others ReduceSum."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("declared", "shape", "steps"),
    [
        ("[2, 16, 8]", (2, 16, 8), 2),
        ("[2, 127]", (2, 127), 1),
        ("[2, 128]", (2, 128), 2),
        ("[300]", (300,), 1),
        ("[N, M]", (3, 2), 2),
        ("[N, 3]", (3, 3), 1),
        ("[3, M, 2]", (3, 4, 2), 2),
    ],
)
def test_long_samples_are_reduced_first(kind: str, declared: str, shape: tuple[int, ...], steps: int) -> None:
    op, x = emitter(x=f"double{declared}"), RNG.standard_normal(shape)
    result = reduced(op, kind, op.val("x"))
    assert [node.op_type for node in op.nodes] == [kind, SECOND.get(kind, "ReduceSum")][:steps]
    found = run(op, result, x=x)
    assert found.shape == ()
    np.testing.assert_allclose(found, KINDS[kind](x))


@pytest.mark.parametrize("kind", KINDS)
def test_a_number_is_its_own_sum(kind: str) -> None:
    op, x = emitter(x="double"), np.array(-3.0)
    result = reduced(op, kind, op.val("x"))
    assert [node.op_type for node in op.nodes] == ([] if kind in ("ReduceSum", "ReduceMean") else [kind])
    np.testing.assert_allclose(run(op, op.Identity(result), x=x), KINDS[kind](x))


def test_what_has_no_known_rank_is_reduced_at_once() -> None:
    op = emitter(x="float[2, 128]")
    op.graph.types["x"].tensor_type.ClearField("shape")
    reduced(op, "ReduceSum", op.val("x"))
    assert [node.op_type for node in op.nodes] == ["ReduceSum"]


@pytest.mark.parametrize("order", ["xy", "yx"])
def test_a_total_has_the_widest_type_of_its_tensors(order: str) -> None:
    op = emitter(x="float[2, 3]", y="double[4]")
    x, y = RNG.standard_normal((2, 3)).astype(np.float32), RNG.standard_normal(4)
    result = total(op, "ReduceL1", *map(op.val, order))
    assert result.dtype == TensorProto.DOUBLE
    np.testing.assert_allclose(run(op, result, x=x, y=y), np.abs(x).sum() + np.abs(y).sum(), rtol=1e-6)


def test_the_total_of_one_tensor_takes_no_sum() -> None:
    op = emitter(x="float[2, 3]")
    assert total(op, "ReduceL1", op.val("x")).dtype == TensorProto.FLOAT
    assert [node.op_type for node in op.nodes] == ["ReduceL1"]


def test_a_norm_is_the_root_of_all_squares() -> None:
    op = emitter(x="double[3, 200]", y="double[4]")
    x, y = RNG.standard_normal((3, 200)), RNG.standard_normal(4)
    found = run(op, norm(op, op.val("x"), op.val("y")), x=x, y=y)
    np.testing.assert_allclose(found, np.sqrt((x * x).sum() + (y * y).sum()))
