"""What the emitter writes computes what numpy does, has the types it says, and is decided early where that can be.

The measure is numpy; each model is checked by onnx.checker, and run by onnx.reference at fixed and at symbolic sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import FORWARD, ROLE
from onnxgrad_cli.ir.type_inference import infer_types
from onnxgrad_cli.ir.types import dtype_of, shape_of

X = np.random.default_rng(0).uniform(0.5, 2, (2, 3, 4)).astype(np.float32)
ROW = np.random.default_rng(1).uniform(0.5, 2, (3, 1)).astype(np.float32)
VALUES = {"x": X, "row": ROW}
SHAPES = {True: {"x": "[a, b, c]", "row": "[b, 1]"}, False: {"x": "[2, 3, 4]", "row": "[3, 1]"}}


def emitter(symbolic: bool = False, opset: int = 18, dtype: str = "float") -> Op:
    inputs = ", ".join(f"{dtype}{shape} {name}" for name, shape in SHAPES[symbolic].items())
    graph = Graph(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]> g ({inputs}) => () {{}}'))
    infer_types(graph)
    return Op(graph)


def run(op: Op, result: Val, x: np.ndarray = X) -> np.ndarray:
    """The value, of whose model the checker and the type that the emitter knows are held against what is computed."""
    op.graph.nodes.extend(op.nodes)
    op.graph.add_output(result.name, result.type)
    model = op.graph.commit()
    onnx.checker.check_model(model, full_check=True)
    feeds = {"x": x, "row": ROW.astype(x.dtype)}
    (found,) = ReferenceEvaluator(model).run(None, feeds)
    assert onnx.helper.tensor_dtype_to_np_dtype(dtype_of(result.type)) == found.dtype
    for known, size in zip(shape_of(result.type) or (), found.shape, strict=True):
        assert not isinstance(known, int) or known == size
    return found


WRITTEN: dict[str, tuple[Callable[[Op, Val, Val], Val], Callable[[np.ndarray, np.ndarray], Any]]] = {
    "operators": (lambda op, x, r: 1 + (2 - x) / r + x * 3 - -x, lambda x, r: 1 + (2 - x) / r + x * 3 + x),
    "power": (lambda op, x, r: x**2, lambda x, r: x**2),
    "product": (lambda op, x, r: op.swap_last(x) @ r, lambda x, r: np.swapaxes(x, 1, 2) @ r),
    "comparison": (lambda op, x, r: op.Where(x > r, x, r), np.maximum),
    "sum": (lambda op, x, r: op.sum(x, [-1]), lambda x, r: x.sum(-1, keepdims=True)),
    "sum of all": (lambda op, x, r: op.sum(x, keepdims=False), lambda x, r: x.sum()),
    "mean": (lambda op, x, r: op.mean(x, [0, 2], keepdims=False), lambda x, r: x.mean((0, 2))),
    "maximum": (lambda op, x, r: op.max(x, [1]), lambda x, r: x.max(1, keepdims=True)),
    "product of entries": (lambda op, x, r: op.prod(x, [1, 2]), lambda x, r: x.prod((1, 2), keepdims=True)),
    "product to fewer axes": (lambda op, x, r: op.prod(x, [1], keepdims=False), lambda x, r: x.prod(1)),
    "reduced, axes kept": (lambda op, x, r: op.reduce("ReduceL1", x, [1]), lambda x, r: x.sum(1, keepdims=True)),
    "reduced over no axes": (lambda op, x, r: op.sum(x, []), lambda x, r: x),
    "sum to a row": (lambda op, x, r: op.sum_to(x, r), lambda x, r: x.sum((0, 2))[:, None]),
    "sum of leading axes": (
        lambda op, x, r: op.sum_to(x, op.squeeze(op.max(x, [0, 1]), [0, 1])),
        lambda x, r: x.sum((0, 1)),
    ),
    "sum of an inner axis": (lambda op, x, r: op.sum_to(x, op.max(x, [1])), lambda x, r: x.sum(1, keepdims=True)),
    "reduced to fewer axes": (lambda op, x, r: op.sum(x, [-1, 0], keepdims=False), lambda x, r: x.sum((0, 2))),
    "reduced over all": (lambda op, x, r: op.mean(x), lambda x, r: x.mean(keepdims=True)),
    "reduced to a number": (lambda op, x, r: op.max(x, keepdims=False), lambda x, r: x.max()),
    "expanded": (lambda op, x, r: op.expand_like(r, x), lambda x, r: np.broadcast_to(r, x.shape)),
    "expanded and used": (lambda op, x, r: op.expand_like(r, x) * x, lambda x, r: r * x),
    "shape": (lambda op, x, r: op.shape(x), lambda x, r: np.array(x.shape)),
    "size of an axis": (lambda op, x, r: op.dim(x, -1), lambda x, r: np.array(x.shape[-1:])),
    "count": (lambda op, x, r: op.count(x, [0, 2]), lambda x, r: np.float32(x.shape[0] * x.shape[2])),
    "per": (lambda op, x, r: op.per(x, x, [1]), lambda x, r: x / x.shape[1]),
    "reshaped": (lambda op, x, r: op.reshape(x, [-1, op.size(x, 2)]), lambda x, r: x.reshape(-1, x.shape[2])),
    "reshaped back": (
        lambda op, x, r: op.reshape_like(op.reshape(x, [-1]), x) * r,
        lambda x, r: x * r,
    ),
    "squeezed": (lambda op, x, r: op.squeeze(r, [1]), lambda x, r: r[:, 0]),
    "unsqueezed": (lambda op, x, r: op.unsqueeze(r, [0, 3]), lambda x, r: r[None, :, :, None]),
    "filled": (lambda op, x, r: op.fill(1.5, x), lambda x, r: np.full_like(x, 1.5)),
    "zeros": (lambda op, x, r: op.zeros([2, op.size(x, 1)], x), lambda x, r: np.zeros((2, x.shape[1]), x.dtype)),
    "steps": (lambda op, x, r: op.steps(op.size(x, 2), 1, 3), lambda x, r: np.arange(x.shape[2]).reshape(1, -1, 1)),
    "split": (lambda op, x, r: op.split(x, [1, 2], 1)[1], lambda x, r: x[:, 1:]),
    "vector": (lambda op, x, r: op.vector([7, op.dim(x, 0)]), lambda x, r: np.array([7, x.shape[0]])),
    "cast": (lambda op, x, r: op.cast(x, TensorProto.DOUBLE), lambda x, r: x.astype(np.float64)),
    "scattered": (
        lambda op, x, r: op.scatter(op.fill(0.0, r), op.const(np.array([[1], [1], [2]])), r, 0) + r,
        lambda x, r: r + np.stack([np.zeros(1, r.dtype), r[0] + r[1], r[2]]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("opset", [13, 18])
@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_is_what_numpy_computes(name: str, symbolic: bool, opset: int) -> None:
    write, wanted = WRITTEN[name]
    if opset < 16 and name == "scattered":
        pytest.skip("ScatterElements adds up from opset 16 on")
    op = emitter(symbolic, opset)
    found = run(op, op.Identity(write(op, op.val("x"), op.val("row"))))
    expected = np.asarray(wanted(X, ROW))
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


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
    assert caution.subject == "layer"
    assert caution.text == "layer: un-broadcast of 'row' decided at run time (an unknown rank)"
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
    assert caution.text.endswith("un-broadcast of 'row' decided at run time ('a' against 'b' on axis 0)")


def test_what_is_known_is_not_computed() -> None:
    op = emitter()
    x = op.val("x")
    assert op.shape(x).const.tolist() == [2, 3, 4]
    assert op.dim(x, -1).const.tolist() == [4] and op.size(x, 1) == 3
    assert op.count(x).const == 24.0
    assert op.sum_to(x, x) is x and op.reshape(x, [2, 3, 4]) is x and op.cast(x, TensorProto.FLOAT) is x
    assert op.reshape_like(x, x) is x and op.expand_like(x, x) is x and op.squeeze(x, []) is x
    assert not op.nodes


def test_a_shape_is_read_at_run_time_only_where_it_must_be() -> None:
    """One size that has a symbol follows from the others; several ones have to be those of the operand's own axes."""
    text = '<ir_version: 8, opset_import: ["": 15]> g (float[6, N] x, float[N, 6] one, float[M, 6, N] two) => () {}'
    graph = Graph(onnx.parser.parse_model(text))
    infer_types(graph)
    for like, kinds in (("one", ["Reshape"]), ("two", ["Shape", "Reshape"])):
        op = Op(graph)
        assert op.reshape_like(op.val("x"), op.val(like)).shape == op.val(like).shape
        assert [node.op_type for node in op.nodes] == kinds
    op = Op(graph)
    op.dim(op.val("x"), 1)
    assert [node.op_type for node in op.nodes] == ["Shape"], "from opset 15 on it reads a single size"


def test_the_sizes_of_zeros_are_known_as_far_as_they_are_given() -> None:
    op = emitter(symbolic=True)
    assert op.zeros([2, op.size(op.val("x"), 1)], op.val("x")).shape[0] == 2


def test_a_shape_that_inference_would_not_find_is_declared() -> None:
    op = emitter(symbolic=True)
    declared = op.Reshape(op.val("x"), op.Shape(op.val("x")), shape=["a", "b", "c"])
    found = op.max(op.val("x"), [1])
    assert declared.name in op.graph.declared_shapes and found.name not in op.graph.declared_shapes


SCATTERED = {1: [[1], [0], [1]], -1: [[1], [0], [1]], 0: [[1, 2]]}
"""Axis -> places of one number along it at each place elsewhere, in a tensor of 3 x 2."""


@pytest.mark.parametrize("summed", [0, 1, -1])
@pytest.mark.parametrize("axis", SCATTERED)
def test_a_sum_along_what_one_number_was_scattered_is_that_number(axis: int, summed: int) -> None:
    op, places = emitter(), np.array(SCATTERED[axis])
    updates = np.random.default_rng(2).standard_normal(places.shape).astype(np.float32)
    zeros = np.zeros((3, 2), np.float32)
    given = op.const(updates)
    result = op.sum(op.scatter(op.const(zeros), op.const(places), given, axis), [summed])
    np.put_along_axis(zeros, places, updates, axis)
    assert (result.name == given.name) == (axis % 2 == summed % 2)
    np.testing.assert_array_equal(run(op, op.Identity(result)), zeros.sum(summed, keepdims=True))


@pytest.mark.parametrize("symbolic", [False, True])
def test_operands_of_the_types_of_earlier_ones_are_looked_at_all_the_same(symbolic: bool) -> None:
    op = emitter(symbolic)
    x, row = op.val("x"), op.val("row")
    plain = [x * x, x + x]  # what is like these is written at once
    wide = op.expand_like(row, x)
    assert wide.type is x.type and wide.known_shape == x.known_shape
    again = [wide * x, x + wide, x * x]
    (product,), (total,), (same,) = ([n for n in op.nodes if n.output[0] == value.name] for value in again)
    assert (product.input, total.input, same.output) == (["row", "x"], ["x", "row"], [plain[0].name])
    np.testing.assert_allclose(run(op, again[0] - again[1]), X * ROW - (X + ROW))


def test_what_is_added_to_a_scattered_tensor_is_scattered_onto_though_others_were_added() -> None:
    op = emitter()
    row = op.val("row")
    assert (row + row).type is row.type
    scattered = op.scatter(op.fill(0.0, row), op.const(np.array([[1], [1], [2]])), row, 0)
    assert scattered.type is row.type
    total = scattered + row
    assert op.nodes[-1].op_type == "ScatterElements" and op.nodes[-1].output == [total.name]


def test_a_node_from_elsewhere_is_typed_and_an_operator_has_the_defaults_of_its_schema() -> None:
    op = emitter()
    node = onnx.helper.make_node("Concat", ["x", "x"], ["y"], axis=1)
    assert shape_of(op.infer(node)["y"]) == (2, 6, 4)
    assert op.attributes("Softmax") == {"axis": -1} and op.attributes("Nothing", "of.nobody") == {}


def test_a_refusal_has_its_reason_and_a_hint() -> None:
    found = emitter().no("it has none", "leave it")
    assert (found.reason, found.hint) == ("it has none", "leave it")


def test_the_same_is_written_once_and_what_is_drawn_is_not() -> None:
    op = emitter()
    x = op.val("x")
    assert (x * 2).name == (x * 2).name != (x * 3).name
    assert (
        op.Split(x, axis=2, num_outputs=2, outputs=2)[1].name == op.Split(x, axis=2, num_outputs=2, outputs=2)[1].name
    )
    assert op.RandomNormalLike(x).name != op.RandomNormalLike(x).name
    assert [node.op_type for node in op.nodes] == ["Mul", "Mul", "Split", "RandomNormalLike", "RandomNormalLike"]
    assert len({node.name for node in op.nodes}) == len(op.nodes)
    assert op.const(2.0, x).name == op.const(np.float32(2), x).name != op.const(2.0, TensorProto.DOUBLE).name


def test_nodes_say_what_they_are_for() -> None:
    op = emitter()
    op.scope, op.role, op.forward = "grad/layer", "backward", "layer"
    op.Exp(op.val("x"))
    (node,) = op.nodes
    assert node.name == "grad/layer/Exp"
    assert emitter().Exp(op.val("x")).name == "Exp_out"
    assert node.metadata == {ROLE: "backward", FORWARD: "layer"}


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


def test_a_result_is_called_what_is_asked() -> None:
    op = emitter()
    x = op.val("x")
    twice = x * 2
    assert op.rename(twice, "double").name == "double"
    op.rename_all({"again": op.val("double"), "input": x})
    made = [name for node in op.nodes for name in node.output]
    assert {"double", "again", "input"} <= set(made)
    np.testing.assert_array_equal(run(op, op.val("again")), 2 * X)


def test_only_operators_are_attributes() -> None:
    with pytest.raises(AttributeError):
        _ = emitter().matmul
