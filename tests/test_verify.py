"""The proof itself: it passes what is right and fails what is wrong, in float64 and in float32."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxgrad_cli import registry
from onnxgrad_cli.builder import build
from onnxgrad_cli.passes.describe import describe
from onnxgrad_cli.pipeline import LossSpec, Options
from onnxgrad_cli.proof.verify import Proof, prove

SAMPLES = Path(__file__).parent.parent / "sample_models"
MLP = """
<ir_version: 10, opset_import: ["" : 18]>
g (float[N, 4] x) => (float[N, 2] y)
<float[4, 3] w1 = {0.5, -0.2, 0.3, 0.1, 0.4, -0.6, 0.7, 0.2, -0.1, 0.3, -0.5, 0.6}, float[3] b1 = {0.1, -0.1, 0.2},
 float[3, 2] w2 = {0.3, -0.7, 0.2, 0.5, -0.4, 0.6}>
{ h = Gemm(x, w1, b1) a = ACTIVATION(h) y = MatMul(a, w2) }
"""


def parse(activation: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(MLP.replace("ACTIVATION", activation))


def proof_of(activation: str) -> Proof:
    model = build(parse(activation)).model
    return prove(model, describe(model), original=parse(activation))


@pytest.mark.parametrize("activation", ["Tanh", "Relu", "Sigmoid", "Gelu", "HardSwish"])
def test_a_right_gradient_passes(activation: str) -> None:
    proof = proof_of(activation if activation != "Gelu" else "Erf")
    assert proof.status == "passed", proof.steps
    assert "float64" in proof.executor
    assert [step.status for step in proof.steps] == ["passed"] * 6


@pytest.mark.parametrize(
    "wrong",
    [
        lambda op, g, y, x: g * (1 - y),
        lambda op, g, y, x: g * (1 - y * y) * 1.001,
        lambda op, g, y, x: None,
    ],
    ids=["another formula", "a thousandth too much", "nothing"],
)
def test_a_wrong_gradient_fails_and_is_named(wrong: object) -> None:
    with registry.scoped():
        registry.rule("Tanh", override=True)(wrong)  # type: ignore[arg-type]
        proof = proof_of("Tanh")
    assert proof.failed
    assert "w1" in proof.steps[-1].detail
    assert "w2 (" not in proof.steps[-1].detail  # its gradient does not pass through the activation


def test_float32_alone_finds_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxgrad_cli.proof.measure.to_double", _refuse)
    assert proof_of("Tanh").status == "passed"
    assert "float32" in proof_of("Tanh").executor
    with registry.scoped():
        registry.rule("Tanh", override=True)(lambda op, g, y, x: g * (1 - y))
        assert proof_of("Tanh").failed


def _refuse(model: onnx.ModelProto) -> onnx.ModelProto:
    raise NotImplementedError


@pytest.mark.parametrize("name", ["digits_mlp", "digits_cnn", "tiny_transformer", "symbolic"])
def test_float32_gives_no_false_alarm(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxgrad_cli.proof.measure.to_double", _refuse)
    options = Options(losses=(LossSpec("cross-entropy"),))
    model = build(onnx.load(SAMPLES / f"{name}.onnx"), options).model
    for seed in range(3):
        proof = prove(model, describe(model), seed=seed, budget=0.5)
        assert proof.status == "passed", proof.steps[-1]


def test_a_changed_forward_part_fails() -> None:
    model = build(parse("Tanh")).model
    other = parse("Sigmoid")
    proof = prove(model, describe(model), original=other)
    assert {step.name: step.status for step in proof.steps}["computes what the original computes"] == "failed"


def test_large_models_are_proved_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxgrad_cli.proof.verify.LARGE", 10)
    model = build(parse("Tanh")).model
    proof = prove(model, describe(model))
    assert proof.status == "skipped"
    assert "--verify" in proof.reason
    assert prove(model, describe(model), force=True).status == "passed"


def test_data_outside_the_domain_is_drawn_again() -> None:
    text = """
    <ir_version: 10, opset_import: ["" : 18]>
    g (float[N, 2] x) => (float[N, 2] y) <float[2] w = {1, 2}> { l = Log(x) y = Mul(l, w) }
    """
    model = build(onnx.parser.parse_model(text)).model
    assert prove(model, describe(model)).status == "passed"


def test_given_data_are_used() -> None:
    model = build(parse("Tanh")).model
    x = np.full((5, 4), 0.5, np.float32)
    proof = prove(model, describe(model), data={"x": x}, sizes={"N": 5})
    assert "x [5, 4]" in proof.steps[2].detail
