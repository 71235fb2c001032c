"""The elements of second derivatives that a proof checks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import parser

from onnxgrad_cli.autodiff import registry
from onnxgrad_cli.common.choices import Derivative
from onnxgrad_cli.derivatives.kinds import derive
from onnxgrad_cli.verification import composed_derivatives
from tests.cli_harness import Shell
from tests.derivatives.test_curvature import CURVATURES, NET, perceptron, proof_of


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("kind", CURVATURES)
def test_one_wrong_element_fails(kind: Derivative, per_sample: bool) -> None:
    original = parser.parse_model(NET.replace("N", "2"))
    model = derive(original, kind, per_sample=per_sample)
    assert proof_of(model, original).verdict == "proved"
    (name,) = (value.name for value in model.graph.output)
    shape = [dim.dim_value for dim in model.graph.output[0].type.tensor_type.shape.dim]
    factors = np.ones(shape, np.float32)
    factors.reshape(-1)[-1] = 1.01
    for node in model.graph.node:
        node.output[:] = ["right" if output == name else output for output in node.output]
    model.graph.initializer.append(onnx.numpy_helper.from_array(factors, "factors"))
    model.graph.node.append(onnx.helper.make_node("Mul", ["right", "factors"], [name]))
    proof = proof_of(model, original)
    assert proof.failed and "by " in proof.why


def test_a_wrong_rule_fails_in_the_part_that_is_proved_first() -> None:
    original = parser.parse_model(NET)
    with registry.scoped():
        registry.rule("Sub", override=True)(lambda op, g, y, a, b: (g * 1.01, -g * 1.01))
        proof = proof_of(derive(original, "laplacian"), original)
    assert proof.failed and "hvp that" in proof.why


def test_the_first_and_the_last_element_are_always_checked() -> None:
    """A block of rows that is only partly used ends there."""
    for size in (1, composed_derivatives.MAX_PROBES, composed_derivatives.MAX_PROBES + 1, 1024):
        positions = composed_derivatives.probes(size, np.random.default_rng(0))
        assert {0, size - 1} <= set(positions) and len(set(positions)) == len(positions)
        assert len(positions) == min(size, composed_derivatives.MAX_PROBES)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CURVATURES)
def test_1024_inputs_are_proved_by_default(
    kind: Derivative, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(perceptron(1024)[2], "net.onnx")
    done = Shell(tmp_path, capsys)("derive", "net.onnx", "--kind", kind, "--per-sample", "--json")
    assert done.code == 0 and done.json["proof"]["verdict"] == "proved", done.out + done.err
