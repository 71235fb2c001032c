"""Sums over what was broadcast, and reductions in the half types, against numpy."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx.reference import ReferenceEvaluator

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.type_inference import infer_types
from tests.emission.test_emitter import emitter, run

X = np.random.default_rng(0).uniform(0.5, 2, (2, 3, 4)).astype(np.float32)


@pytest.mark.parametrize("constant_axes", [False, True])
@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 1, 4), (1, 3, 1), (1, 1, 1)])
def test_what_was_broadcast_is_decided_at_run_time_where_symbols_differ(
    shape: tuple[int, ...], constant_axes: bool
) -> None:
    text = '<ir_version: 8, opset_import: ["": 18]> g (float[a, b, c] x, float[d, e, f] row) => () {}'
    graph = Graph(onnx.parser.parse_model(text))
    infer_types(graph)
    op = Op(graph)
    op.constant_axes = constant_axes
    result = op.sum_to(op.val("x"), op.val("row"))
    assert [caution.kind for caution in op.cautions] == ["run-time sum"]
    assert result.known_shape == op.val("row").known_shape
    (summed,) = [node for node in op.nodes if node.op_type == "ReduceSum"]
    assert len(op.val(summed.output[0]).shape) == 3
    assert (summed.input[1] in graph.initializers) == constant_axes
    graph.nodes.extend(op.nodes)
    graph.add_output(result.name, result.type)
    (found,) = ReferenceEvaluator(graph.commit()).run(None, {"x": X, "row": np.zeros(shape, np.float32)})
    gone = tuple(axis for axis, size in enumerate(shape) if size == 1)
    np.testing.assert_allclose(found, X.sum(gone, keepdims=True), rtol=1e-6)


@pytest.mark.parametrize("size", [1, 3])
def test_where_one_axis_may_be_broadcast_the_others_stay(size: int) -> None:
    text = '<ir_version: 8, opset_import: ["": 18]> g (float[a, b, 4] x, float[e, 4] row) => () {}'
    graph = Graph(onnx.parser.parse_model(text))
    infer_types(graph)
    op = Op(graph)
    op.constant_axes = True
    result = op.sum_to(op.val("x"), op.val("row"))
    graph.nodes.extend(op.nodes)
    graph.add_output(result.name, result.type)
    (found,) = ReferenceEvaluator(graph.commit()).run(None, {"x": X, "row": np.zeros((size, 4), np.float32)})
    np.testing.assert_allclose(found, X.sum(0) if size == 3 else X.sum((0, 1))[None], rtol=1e-6)


def test_what_was_broadcast_may_be_empty() -> None:
    text = '<ir_version: 8, opset_import: ["": 18]> g (float[a, b, c] x, float[d, e] row) => () {}'
    graph = Graph(onnx.parser.parse_model(text))
    infer_types(graph)
    op = Op(graph)
    result = op.sum_to(op.val("x"), op.val("row"))
    graph.nodes.extend(op.nodes)
    graph.add_output(result.name, result.type)
    feeds = {"x": np.zeros((2, 0, 3), np.float32), "row": np.zeros((0, 3), np.float32)}
    for executor in ("onnxruntime", "reference"):
        assert Executor(graph.commit(), executor)(feeds)[result.name].shape == (0, 3)


@pytest.mark.parametrize("row", ["float[3, 1] row", "float row"])
def test_what_was_broadcast_is_decided_at_run_time_where_a_rank_is_unknown(row: str) -> None:
    graph = Graph(
        onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> g (float[2, 3, 4] x, {row}) => () {{}}')
    )
    infer_types(graph)
    graph.types["x"].tensor_type.ClearField("shape")
    op = Op(graph)
    op.forward = "layer"
    result = op.sum_to(op.val("x"), op.val("row"))
    (caution,) = op.cautions
    assert caution.subject == "layer" and "'row'" in caution.text and "unknown rank" in caution.text
    assert result.known_shape == op.val("row").known_shape
    graph.nodes.extend(op.nodes)
    graph.add_output(result.name, result.type)
    given = np.zeros((3, 1) if "3" in row else (), np.float32)
    (found,) = ReferenceEvaluator(graph.commit()).run(None, {"x": X, "row": given})
    np.testing.assert_allclose(found, X.sum((0, 2))[:, None] if "3" in row else X.sum(), rtol=1e-6)


def test_what_was_broadcast_is_summed_by_as_few_nodes_as_it_takes() -> None:
    """And where nothing was, by none: sizes that are both unknown by one name, or that are equal."""
    op = emitter()
    x, matrix = op.val("x"), op.squeeze(op.max(op.val("x"), [0]), [0])
    op.nodes.clear()
    result = op.sum_to(x, matrix)
    assert [node.op_type for node in op.nodes] == ["ReduceSum"] and result.shape == (3, 4)
    graph = Graph(
        onnx.parser.parse_model(
            '<ir_version: 8, opset_import: ["": 18]> g (float[a, 1, 4] x, float[b, 1, 4] row) => () {}'
        )
    )
    infer_types(graph)
    op = Op(graph)
    x, row = op.val("x"), op.val("row")
    assert op.sum_to(x, x) is x and not op.nodes
    op.sum_to(x, row)
    (caution,) = op.cautions
    assert "'row'" in caution.text and "'a' against 'b' on axis 0" in caution.text


def test_half_types_are_added_up_in_float32() -> None:
    """1 and 4096 times 2^-12 are 2; in float16 each of them is lost beside 1."""
    op = emitter(dtype="float16")
    total = op.sum(op.reshape(op.val("x"), [-1]), [0])
    small = np.full((2, 3, 4), 0.0002, np.float16)
    found = run(op, total, small)
    assert [node.op_type for node in op.nodes] == ["Reshape", "Cast", "ReduceSum", "Cast"]
    np.testing.assert_array_equal(found, small.astype(np.float32).sum(keepdims=True).ravel().astype(np.float16))


@pytest.mark.parametrize("kind", ["ReduceSum", "ReduceMax"])
@pytest.mark.parametrize("keepdims", [True, False])
def test_half_types_are_reduced_over_the_axes_that_are_asked_for(kind: str, keepdims: bool) -> None:
    op = emitter(dtype="float16")
    x = X.astype(np.float16)
    found = run(op, op.reduce(kind, op.val("x"), [0, 2], keepdims), x)
    expected = {"ReduceSum": np.sum, "ReduceMax": np.max}[kind](x.astype(np.float32), (0, 2), keepdims=keepdims)
    np.testing.assert_allclose(found, expected, rtol=1e-3)
