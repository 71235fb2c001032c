"""Nodes are typed, written once and named, and have the defaults of their schema."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto

from onnxgrad_cli.ir.node import FORWARD, ROLE
from onnxgrad_cli.ir.types import shape_of
from tests.emission.test_emitter import emitter, run

X = np.random.default_rng(0).uniform(0.5, 2, (2, 3, 4)).astype(np.float32)


ROW = np.random.default_rng(1).uniform(0.5, 2, (3, 1)).astype(np.float32)


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


def test_a_node_from_elsewhere_is_typed_and_an_operator_has_the_defaults_of_its_schema() -> None:
    op = emitter()
    node = onnx.helper.make_node("Concat", ["x", "x"], ["y"], axis=1)
    assert shape_of(op.infer(node)["y"]) == (2, 6, 4)
    assert op.attributes("Softmax") == {"axis": -1} and op.attributes("Nothing", "of.nobody") == {}


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
