"""The forward part of a training model is compared with the original, in float64 where float32 is noise."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxgrad_cli.builder import build
from onnxgrad_cli.metadata import describe
from onnxgrad_cli.options import Options
from onnxgrad_cli.verification.proof import prove
from onnxgrad_cli.verification.proof_checks import ORIGINAL
from tests.verification.test_proof import parse


def test_a_changed_forward_part_fails() -> None:
    model = build(parse("Tanh")).model
    other = parse("Sigmoid")
    proof = prove(model, describe(model), original=other)
    assert {step.name: step.status for step in proof.steps}[ORIGINAL[0]] == "failed"


ROUNDED = """
<ir_version: 10, opset_import: ["" : 18]> g (float[1, 8, 4] x) => (float[1, 16, 3] y)
<float[3] far = {FAR}, float[3] near = {FAR}, float factor = {FACTOR}, float[3] scales = {1, 2, 1}>
{ h = MatMul(x, w) a = Add(h, far) b = Sub(a, near) c = Mul(b, factor) y = Resize<mode = "nearest">(c, , scales) }
"""


def rounded(far: float, factor: float = 1) -> onnx.ModelProto:
    """A model that adds a number and takes it off again."""
    text = ROUNDED.replace("FAR", f"{far}, {far}, {far}")
    model = onnx.parser.parse_model(text.replace("FACTOR", str(factor)))
    w = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(w, "w"))
    return model


@pytest.mark.parametrize(("factor", "status"), [(1, "passed"), (1.001, "failed")])
def test_where_float32_is_noise_forward_parts_are_compared_in_float64(factor: float, status: str) -> None:
    """What is added and taken off again leaves few digits; of the floats of the model, scales are not to be moved."""

    model = build(rounded(0, factor), Options(train=("w", "far", "near"))).model
    proof = prove(model, describe(model), original=rounded(1e6))
    steps = {step.name: step for step in proof.steps}
    step = steps[ORIGINAL[0]]
    assert (step.status, "float64" in step.detail) == (status, True), step


@pytest.mark.parametrize("bits", [4, 8])
def test_a_kernel_that_may_round_is_compared_without_rounding(bits: int) -> None:
    """At `accuracy_level` 4 onnxruntime rounds what it multiplies with a quantized matrix to 8 bits."""
    rng = np.random.default_rng(0)
    original = onnx.parser.parse_model(f"""
    <ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
    g (float[N, 64] x) => (float[N, 16] y) {{ h = MatMul(x, w)
        y = com.microsoft.MatMulNBits<K = 64, N = 16, bits = {bits}, block_size = 32, accuracy_level = 4>(h, b, s) }}
    """)
    blob = rng.integers(0, 256, (16, 2, 4 * bits)).astype(np.uint8)
    arrays = {"w": rng.standard_normal((64, 64)), "s": rng.uniform(0.1, 1, (16, 2))}
    original.graph.initializer.extend(numpy_helper.from_array(x.astype(np.float32), n) for n, x in arrays.items())
    original.graph.initializer.append(numpy_helper.from_array(blob, "b"))
    model = build(original).model
    proof = prove(model, describe(model), original=original)
    assert {step.name: step.status for step in proof.steps}[ORIGINAL[0]] == "passed"
    (node,) = (node for node in original.graph.node if node.domain)
    assert any(attribute.name == "accuracy_level" for attribute in node.attribute)


def test_a_recurrent_kernel_that_rounds_is_compared_as_narrow_floats_are() -> None:
    """DynamicQuantizeLSTM rounds to 8 bits what it multiplies."""
    rng = np.random.default_rng(0)
    original = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["": 17, "com.microsoft": 1]>
    g (float[1, n, 5] x) => (float[1, 1, n, 4] y)
    <float[1] ws = {0.01}, float[1] rs = {0.01}, uint8[1] wz = {128}, uint8[1] rz = {128}> {
      y = com.microsoft.DynamicQuantizeLSTM<hidden_size = 4>(x, w, r, , , , , , ws, wz, rs, rz) }""")
    for name, shape in {"w": (1, 5, 16), "r": (1, 4, 16)}.items():
        original.graph.initializer.append(numpy_helper.from_array(rng.integers(0, 256, shape, np.uint8), name))
    model = build(original, Options(quantization="ste")).model
    steps = {step.name: step for step in prove(model, describe(model), original=original).steps}
    found = steps[ORIGINAL[0]]
    assert found.status == "passed" and float(found.detail.split()[3]) > 1e-4, found.detail
