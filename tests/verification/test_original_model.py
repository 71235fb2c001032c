"""Originals that the runtime does not load or run."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
from onnx import numpy_helper

from onnxgrad_cli.builder import build
from onnxgrad_cli.execution.kernels import newest_loaded
from onnxgrad_cli.metadata import describe
from onnxgrad_cli.verification.proof import prove
from onnxgrad_cli.verification.proof_checks import ORIGINAL
from tests.verification.test_proof import MLP, parse


def test_what_onnxruntime_does_not_load_of_the_original_either_is_no_fault() -> None:
    original = onnx.parser.parse_model("""
    <ir_version: 10, opset_import: ["" : 18]> g (bfloat16[N, 4] x) => (bfloat16[N, 3] y)
        { h = MatMul(x, w) y = Tanh(h) }
    """)
    weight = np.random.default_rng(0).standard_normal((4, 3)).astype(ml_dtypes.bfloat16)
    original.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    model = build(original).model
    proof = prove(model, describe(model), original=original)
    assert proof.verdict == "not_proved" and "original either" in proof.why
    assert prove(model, describe(model)).failed


def test_an_original_newer_than_onnxruntime_is_compared_on_the_reference() -> None:
    text = MLP.replace("ACTIVATION", "Tanh").replace('"" : 18', '"" : 28')
    model = build(onnx.parser.parse_model(text)).model
    proof = prove(model, describe(model), original=onnx.parser.parse_model(text))
    assert [step.status for step in proof.steps] == ["passed"] * 7
    executor = "onnxruntime" if newest_loaded(28) == 28 else "onnx.reference"
    assert executor in next(step for step in proof.steps if "original" in step.name).detail


def test_an_original_that_does_not_run_is_not_compared() -> None:
    original = parse("Tanh")
    for node in original.graph.node:
        node.name = "twice"
    model = build(parse("Tanh")).model
    proof = prove(model, describe(model), original=original)
    (step,) = [step for step in proof.steps if step.status == "skipped"]
    assert proof.verdict == "not_proved" and proof.why == f"{ORIGINAL[0]}: {step.detail}"
    assert step.name == ORIGINAL[0] and "not run" in step.detail and "twice" in step.detail
