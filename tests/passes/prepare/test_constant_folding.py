"""Constants are computed when a model is prepared, and weights are not."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper

from onnxgrad_cli.builder import build
from onnxgrad_cli.options import Options
from tests.passes.test_pipeline import parse, run


def test_shapes_of_constants_are_computed_and_no_weight_is() -> None:
    """Shape inference follows no Mod: without folding, the rank behind the Reshape is unknown."""
    model = parse("""
    g (float[4, 6] x) => (float[4, 6] y)
    <int64[1] two = {2}, int64[1] three = {3}, int64[1] zero = {0}, int64[1] all = {100}, int64[2] parts = {2, 3},
     float[6] w = {1, 2, 3, 4, 5, 6}, int64[2] whole = {4, 6}, float temperature = {2}>
    {
        one = Mod(three, two) size = Shape(x) head = Slice(size, zero, one) dims = Concat<axis = 0>(head, parts)
        scaled = Mul(x, w) split = Reshape(scaled, dims) swapped = Transpose<perm = [0, 2, 1]>(split)
        joined = Reshape(swapped, whole) factor = Exp(temperature) y = Mul(joined, factor)
    }
    """)
    built = build(model, Options(train=("w", "temperature")))
    forward = [node.op_type for node in built.model.graph.node][:6]
    assert forward == ["Mul", "Reshape", "Transpose", "Reshape", "Exp", "Mul"]
    names = {tensor.name for tensor in built.model.graph.initializer}
    assert "dims" in names
    assert not names & {"one", "two", "three", "zero", "parts", "head"}
    rng = np.random.default_rng(0)
    x, t = rng.standard_normal((4, 6)).astype(np.float32), np.zeros((4, 6), np.float32)
    result = run(built.model, {"x": x, "label": t})
    w, factor = np.arange(1, 7, dtype=np.float32), np.exp(np.float32(2))
    y = x * w * factor
    np.testing.assert_allclose(result["w_grad"], (2 * y * x * factor / 24).sum(0), rtol=1e-4)
    np.testing.assert_allclose(result["temperature_grad"], (2 * y * y / 24).sum(), rtol=1e-4)


def test_what_is_computed_from_a_static_size_of_a_shape_is_a_constant() -> None:
    """As exporters compute the size of an attention's heads, in floats; shape inference follows no such Cast."""
    model = parse("""
    g (float[batch, 4, 12] x) => (float[batch, 4] y)
    <float[12] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, int64 zero = {0}, int64 last = {-1}, int64 three = {3},
     int64[1] axis = {0}, int64[2] heads = {4, 3}, int64[2] axes = {2, 3}>
    {
        h = Mul(x, w) size = Shape(h) n = Gather(size, zero) width = Gather(size, last) each = Div(width, three)
        real = Cast<to = 1>(each) whole = Cast<to = 7>(real) a = Unsqueeze(n, axis) b = Unsqueeze(whole, axis)
        dims = Concat<axis = 0>(a, heads, b) parted = Reshape(h, dims) y = ReduceSum<keepdims = 0>(parted, axes)
    }
    """)
    built = build(model)
    forward = [node.op_type for node in built.model.graph.node][:6]
    assert forward == ["Mul", "Shape", "Gather", "Unsqueeze", "Concat", "Reshape"]
    assert not any(node.op_type == "Shape" for node in built.model.graph.node if node.name.startswith("grad/parted"))
    x, t = np.ones((2, 4, 12), np.float32), np.zeros((2, 4), np.float32)
    result = run(built.model, {"x": x, "label": t})
    np.testing.assert_allclose(result["w_grad"], np.full(12, 2 * 78.0), rtol=1e-5)


def test_initializers_of_an_old_model_are_constants() -> None:
    """Before IR version 4 every initializer had to be an input; a shape among them is a constant all the same."""
    model = parse(
        """
        g (float[N, 6] x) => (float[N, 2, 3] y) <int64[3] shape = {0, 2, 3}, float[6] w = {1, 2, 3, 4, 5, 6}>
        { h = Mul(x, w) y = Reshape(h, shape) }
        """,
        '<ir_version: 3, opset_import: ["" : 9]>',
    )
    for name, dtype, shape in (("shape", TensorProto.INT64, [3]), ("w", TensorProto.FLOAT, [6])):
        model.graph.input.append(helper.make_tensor_value_info(name, dtype, shape))
    built = build(model)
    assert [value.name for value in built.model.graph.input] == ["x", "label", "w"]
    assert built.graph.constant("shape") is not None
    x, t = np.ones((2, 6), np.float32), np.zeros((2, 2, 3), np.float32)
    np.testing.assert_allclose(run(built.model, {"x": x, "label": t})["w_grad"], np.arange(1, 7) / 3, rtol=1e-6)
