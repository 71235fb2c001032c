"""The proof itself: it passes what is right and fails what is wrong, in float64 and in float32."""

import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxgrad_cli.autodiff import registry
from onnxgrad_cli.builder import build
from onnxgrad_cli.execution import session
from onnxgrad_cli.execution.opsets import newest_loaded
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.metadata import describe
from onnxgrad_cli.options import Options
from onnxgrad_cli.verification import checks
from onnxgrad_cli.verification.proof import Proof, prove

SAMPLES = Path(__file__).parents[2] / "sample_models"
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
    monkeypatch.setattr("onnxgrad_cli.verification.measure.to_double", _refuse)
    assert proof_of("Tanh").status == "passed"
    assert "float32" in proof_of("Tanh").executor
    with registry.scoped():
        registry.rule("Tanh", override=True)(lambda op, g, y, x: g * (1 - y))
        assert proof_of("Tanh").failed


def test_a_fed_gradient_of_the_loss_counts() -> None:
    model = build(parse("Tanh"), Options(yield_="input")).model
    for data in ({}, {"loss_grad": np.array(1024, np.float32)}):
        proof = prove(model, describe(model), original=parse("Tanh"), data=data)
        assert [step.status for step in proof.steps] == ["passed"] * 6, proof.steps
    with registry.scoped():
        registry.rule("Tanh", override=True)(lambda op, g, y, x: g * (1 - y))
        model = build(parse("Tanh"), Options(yield_="input")).model
    assert prove(model, describe(model)).failed


def _refuse(model: onnx.ModelProto) -> onnx.ModelProto:
    raise NotImplementedError


@pytest.mark.parametrize("name", ["digits_mlp", "digits_cnn", "tiny_transformer", "symbolic"])
def test_float32_gives_no_false_alarm(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxgrad_cli.verification.measure.to_double", _refuse)
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


def test_an_original_newer_than_onnxruntime_is_compared_on_the_reference() -> None:
    text = MLP.replace("ACTIVATION", "Tanh").replace('"" : 18', '"" : 28')
    model = build(onnx.parser.parse_model(text)).model
    proof = prove(model, describe(model), original=onnx.parser.parse_model(text))
    assert [step.status for step in proof.steps] == ["passed"] * 6
    executor = "onnxruntime" if newest_loaded(28) == 28 else "onnx.reference"
    assert executor in next(step for step in proof.steps if "original" in step.name).detail


def test_an_original_that_does_not_run_is_not_compared() -> None:
    original = parse("Tanh")
    for node in original.graph.node:
        node.name = "twice"
    model = build(parse("Tanh")).model
    proof = prove(model, describe(model), original=original)
    assert proof.status == "passed"
    (step,) = [step for step in proof.steps if step.status == "skipped"]
    assert "the original does not run" in step.detail
    assert "twice" in step.detail


def test_an_interrupt_while_onnxruntime_is_loaded_is_no_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "onnxruntime":
                raise ImportError("initialization failed") from KeyboardInterrupt()

    model = build(parse("Tanh")).model
    monkeypatch.delitem(sys.modules, "onnxruntime", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(KeyboardInterrupt):
        prove(model, describe(model))


def test_large_models_are_proved_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxgrad_cli.verification.checks.LARGE", 10)
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


def test_a_model_of_many_nodes_is_proven_only_when_asked(monkeypatch):
    """onnxruntime optimizes in a time that grows with the square of the nodes: then it runs the model as it stands."""
    model = build(parse("Tanh")).model
    roles = describe(model)
    monkeypatch.setattr(checks, "LONG", 3)
    monkeypatch.setattr(session, "OPTIMIZED_FOR_FEW_RUNS", 3)
    proof = prove(model, roles)
    assert proof.status == "skipped" and "nodes: ask for it with --verify" in proof.reason
    assert prove(model, roles, force=True).status == "passed"
