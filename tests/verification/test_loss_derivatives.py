"""Derivatives by inner values: what is added to a value proves them."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from onnxgrad_cli.common.choices import Derivative
from onnxgrad_cli.derivatives.kinds import derive
from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.metadata import read_derived
from onnxgrad_cli.verification.derivative_proof import prove_derived
from onnxgrad_cli.verification.original_derivatives import perturbed
from tests.facts import raises


@pytest.mark.parametrize("kind", ["vjp", "jvp"])
def test_values_that_are_infinite_stay_where_they_are(kind: Derivative) -> None:
    """A score of minus infinity hides its entry, and the derivative by it is zero."""
    original = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 18]> g (float[2, 4] x) => (float[2, 4] y) { y = Softmax(x) }'
    )
    model = derive(original, kind)
    said = read_derived(model)
    assert said is not None
    x = np.random.default_rng(0).standard_normal((2, 4)).astype(np.float32)
    x[0, 1] = x[1, 2] = -np.inf
    proof = prove_derived(model, said, original=original, data={"x": x})
    assert proof.verdict == "proved", proof.why


def test_nothing_is_added_to_a_value_whose_type_is_unknown() -> None:
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17, "acme": 1]>
        g (float[2] x) => (float[2] y) { h = acme.Unheard(x) k = acme.Unheard(h) y = Tanh(k) }""")
    with raises(OnnxgradError, "failed", "h"):
        perturbed(model, None, ["h"])
