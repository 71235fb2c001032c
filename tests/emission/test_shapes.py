"""Shapes are constants as far as they are known, and are otherwise read when the model runs."""

from __future__ import annotations

import onnx
import onnx.parser
from onnx import TensorProto

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.type_inference import infer_types
from tests.emission.test_emitter import emitter


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
