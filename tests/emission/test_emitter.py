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
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.type_inference import infer_types
from onnxgrad_cli.ir.types import dtype_of, shape_of

X = np.random.default_rng(0).uniform(0.5, 2, (2, 3, 4)).astype(np.float32)
ROW = np.random.default_rng(1).uniform(0.5, 2, (3, 1)).astype(np.float32)
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


def test_what_is_added_to_a_scattered_tensor_is_scattered_onto_though_others_were_added() -> None:
    op = emitter()
    row = op.val("row")
    assert (row + row).type is row.type
    scattered = op.scatter(op.fill(0.0, row), op.const(np.array([[1], [1], [2]])), row, 0)
    assert scattered.type is row.type
    total = scattered + row
    assert op.nodes[-1].op_type == "ScatterElements" and op.nodes[-1].output == [total.name]
