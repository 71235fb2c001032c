"""Training models for a graphics card: they compute what the standard's do, and leave the processor nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.checker
import pytest
from onnx import ModelProto, TensorProto, helper

from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.type_inference import infer_types
from onnxgrad_cli.targets.cuda import fit
from tests.targets.test_blocked_channels import CASES, assert_gradients_of_pytorch, made, model, session

SAME = {
    "strides, pads at the end": ((2, 8, 8, 8), (6, 8, 3, 3), {"pads": [0, 0, 1, 1], "strides": [2, 2]}),
    "strides, pads at the beginning": ((2, 8, 8, 9), (6, 8, 3, 4), {"pads": [1, 2, 0, 0], "strides": [2, 3]}),
    "strides, wide pads": ((2, 8, 7, 9), (6, 8, 5, 5), {"pads": [4, 0, 0, 3], "strides": [2, 2]}),
}
"""What exporters make of `auto_pad`, and more."""

EVEN = {**CASES, **SAME}


def attribute(node: onnx.NodeProto, name: str) -> list[int]:
    return next((list(a.ints) for a in node.attribute if a.name == name), [])


def left_to_the_processor(proto: ModelProto) -> list[str]:
    """Transposed convolutions that the provider has no kernel for: those of uneven pads."""
    pads = {node.name: attribute(node, "pads") for node in proto.graph.node if node.op_type == "ConvTranspose"}
    return [name for name, each in pads.items() if each[: len(each) // 2] != each[len(each) // 2 :]]


@pytest.mark.parametrize("level", ["ORT_DISABLE_ALL", "ORT_ENABLE_ALL"])
@pytest.mark.parametrize("case", EVEN)
@pytest.mark.thinned(3)
def test_gradients_are_those_of_pytorch(case: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CASES, case, EVEN[case])
    built = made(model(*EVEN[case]), "ort-cuda", grad_of_input=("x",))
    onnx.checker.check_model(built.model, full_check=True)
    assert not left_to_the_processor(built.model)
    assert_gradients_of_pytorch(built.model, case, level)


def test_pads_are_made_even_where_the_standard_has_others() -> None:
    uneven = {case: left_to_the_processor(made(model(*EVEN[case]), "ort-cpu", grad_of_input=("x",)).model)
              for case in SAME}  # fmt: skip
    assert all(uneven.values())


@pytest.mark.parametrize("op_type", ["ReduceSum", "ReduceMean"])
@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("opset", [12, 18])
@pytest.mark.parametrize(
    ("axes", "steps"),
    [((0, 2, 3), [[2, 3], [0]]), ((-1, 0), [[3], [0]]), ((0, 1, 3), [[3], [0, 1]]), ((2, 3), [[2, 3]]),
     ((0, 1), [[0, 1]]), ((1, 2), [[1, 2]]), ((0, 2), [[0, 2]]), ((0, 1, 2, 3), [[0, 1, 2, 3]])],
)  # fmt: skip
def test_sums_over_both_ends_are_taken_in_two_steps(
    op_type: str, keepdims: int, opset: int, axes: tuple[int, ...], steps: list[list[int]]
) -> None:
    as_input = opset >= (13 if op_type == "ReduceSum" else 18)
    given: dict[str, Any] = {} if as_input else {"axes": list(axes)}
    sizes = helper.make_tensor("axes", TensorProto.INT64, [len(axes)], axes)
    nodes = [helper.make_node(op_type, ["x", *["axes"] * as_input], ["s"], "reduced", keepdims=keepdims, **given),
             helper.make_node("Mul", ["s", "s"], ["y"], "squared")]  # fmt: skip
    rank = 4 if keepdims else 4 - len(axes)
    x, y = (helper.make_tensor_value_info(name, 1, [None] * n) for name, n in (("x", 4), ("y", rank)))
    graph = helper.make_graph(nodes, "reduction", [x], [y], [sizes] if as_input else [])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    fitted = Graph(proto)
    infer_types(fitted)
    fit(fitted)
    written = fitted.commit()
    onnx.checker.check_model(written, full_check=True)
    values = {t.name: onnx.numpy_helper.to_array(t).tolist() for t in written.graph.initializer}
    sums = [node for node in written.graph.node if node.op_type == op_type]
    found = [attribute(node, "axes") or values[node.input[1]] for node in sums]
    assert [sorted(axis % 4 for axis in each) for each in found] == steps
    array = np.random.default_rng(0).standard_normal((2, 3, 4, 5)).astype(np.float32)
    kind = np.sum if op_type == "ReduceSum" else np.mean
    expected = kind(array.astype(np.float64), tuple(axes), keepdims=bool(keepdims)) ** 2
    got = session(written).run(["y"], {"x": array})[0]
    np.testing.assert_allclose(got, expected, atol=1e-5 * max(1, np.abs(expected).max()))


@pytest.mark.parametrize("opset", [12, 18])
def test_a_mean_of_integers_is_rounded_once(opset: int) -> None:
    given: dict[str, Any] = {"axes": [0, 2]} if opset < 18 else {}
    axes = [helper.make_tensor("axes", TensorProto.INT64, [2], [0, 2])] if opset >= 18 else []
    nodes = [helper.make_node("ReduceMean", ["x", *(t.name for t in axes)], ["y"], "mean", keepdims=0, **given)]
    x, y = (helper.make_tensor_value_info(name, TensorProto.INT32, [None] * n) for name, n in (("x", 3), ("y", 1)))
    graph = helper.make_graph(nodes, "mean", [x], [y], axes)
    fitted = Graph(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8))
    infer_types(fitted)
    fit(fitted)
    array = np.array([[[3, 0]], [[0, 1]]], np.int32)  # by rows 1 and 0, of which the mean is 0
    np.testing.assert_array_equal(session(fitted.commit()).run(["y"], {"x": array})[0], [1])


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
@pytest.mark.parametrize("op_type", ["ReduceSum", "ReduceMean"])
def test_a_sum_in_16_bits_has_no_part_that_they_do_not_hold(op_type: str, dtype: int) -> None:
    """Of 60,000 twice and their negatives the parts are infinite in float16, the sum is 0."""
    axes = helper.make_tensor("axes", TensorProto.INT64, [2], [0, 2])
    node = helper.make_node(op_type, ["x", "axes"], ["y"], "reduced")
    x, y = (helper.make_tensor_value_info(name, dtype, shape) for name, shape in (("x", [2, 1, 2]), ("y", [1, 1, 1])))
    graph = helper.make_graph([node], "reduction", [x], [y], [axes])
    fitted = Graph(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8))
    infer_types(fitted)
    fit(fitted)
    assert [each.op_type for each in fitted.nodes] == [op_type]
