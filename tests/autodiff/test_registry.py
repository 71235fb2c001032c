"""The registry as others use it: names, scopes, what is replaced, and the operands at which gradients stop."""

import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import onnx
import pytest
import torch

import onnxgrad_cli
from onnxgrad_cli.autodiff import registry
from onnxgrad_cli.builder import TrainingModel, build
from onnxgrad_cli.errors import OnnxgradError, UnsupportedError
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.metadata import describe
from onnxgrad_cli.options import Options
from onnxgrad_cli.verification.proof import prove
from tests.facts import raises
from tests.harness import with_gradient


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    with registry.scoped():
        yield


def parse(nodes: str, weights: str = "float[2, 2] w = {1, 2, 3, 4}, float[2, 2] v = {1, -1, 2, 1}") -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 18]> g (float[N, 2] x) => (float[N, 2] y) <{weights}> {{ {nodes} }}"""
    )


def test_public_names() -> None:
    for name in "all_rules definition gradcheck lookup no_gradient refuse rule scoped".split():
        assert callable(getattr(onnxgrad_cli, name)) and name in onnxgrad_cli.__all__
    from onnxgrad_cli import gradcheck
    from onnxgrad_cli.compat import gradient_definition

    assert callable(gradcheck) and callable(gradient_definition), "no module hides a function of its name"


def test_lookup_and_listing() -> None:
    assert registry.lookup("Relu").source == "onnxgrad_cli.autodiff.rules.activation.relu"
    assert registry.lookup("Relu", "ai.onnx") is registry.lookup("Relu", "", 18)
    assert registry.lookup("Nothing", "my.ops") is None
    names = [(rule.domain, rule.op_type) for rule in registry.all_rules()]
    assert names == sorted(names) and ("", "MatMul") in names


def test_the_default_domain_has_two_names() -> None:
    registry.rule("Relu", domain="ai.onnx", override=True)(lambda op, g, y, x: g)
    assert registry.lookup("Relu").source.startswith("tests.autodiff.test_registry")
    with pytest.raises(OnnxgradError, match="two rules"):
        registry.no_gradient("Relu", domain="ai.onnx")


def test_a_domain_of_ones_own_may_have_any_version() -> None:
    registry.rule("Op", domain="my.ops")(lambda op, g, y, x: g)
    assert registry.lookup("Op", "my.ops", 1000) is not None


def test_zero_and_refused_can_be_overridden() -> None:
    registry.no_gradient("Relu", override=True)
    assert registry.lookup("Relu").is_zero
    registry.refuse("Relu", "for a test", override=True)
    with pytest.raises(UnsupportedError, match="for a test"):
        build(parse("h = MatMul(x, w) y = Relu(h)"))


def test_an_override_may_come_before_anything_is_loaded() -> None:
    program = (
        "from onnxgrad_cli import lookup, rule\n"
        "rule('Relu', override=True)(lambda op, g, y, x: g)\n"
        "print(lookup('Relu').source, lookup('Tanh').source)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["__main__.<lambda>", "onnxgrad_cli.autodiff.rules.activation.tanh"], done.stderr


@pytest.mark.parametrize(
    "cotangent, what",
    [
        (lambda op, g, x: op.sum(g), ("1", "1", "h", "N", "2")),
        (lambda op, g, x: op.sum(g, keepdims=False), ("h", "N", "2")),
        (lambda op, g, x: op.Concat(g, g, axis=1), ("N", "4", "h", "N", "2")),
        (lambda op, g, x: op.cast(g, onnx.TensorProto.DOUBLE), ("h",)),
    ],
)
def test_a_cotangent_that_does_not_fit_its_operand_is_refused(cotangent: object, what: tuple[str, ...]) -> None:
    registry.rule("Relu", override=True)(lambda op, g, y, x: cotangent(op, g, x))  # type: ignore[operator]
    with raises(UnsupportedError, "refused", "Relu_y", "Relu", *what):
        build(parse("h = MatMul(x, w) y = Relu(h)"))


# -- stopped edges --------------------------------------------------------------------------------------------------

GATED = "h = MatMul(x, w) k = MatMul(x, v) s = Sigmoid(k) y = Mul(h, s)"
SHARED = "h = MatMul(x, w) s = Sigmoid(h) y = Mul(h, s)"


def notes(built: TrainingModel) -> list[str]:
    return [caution.text for caution in built.training.cautions if caution.kind == "note"]


def differences(built: TrainingModel) -> tuple[str, str]:
    proof = prove(built.model, describe(built.model))
    assert not proof.failed
    assert (proof.verdict == "proved") == (not built.training.partial)
    step = next(step for step in proof.steps if step.name == "gradients against differences of the loss")
    return step.status, step.detail


def test_a_weight_behind_a_stopped_edge_alone_is_not_trained() -> None:
    registry.stop_gradient("Mul", [1])
    built = build(parse(GATED))
    assert built.training.trained == ["w"]
    assert built.training.not_trained.keys() == {"v"}
    assert differences(built)[0] == "passed"
    with raises(UnsupportedError, "refused", "train", "v", "y", "Mul_y"):
        build(parse(GATED), Options(train=("v",)))


def test_a_stopped_edge_is_a_detach_in_pytorch() -> None:
    registry.stop_gradient("Mul", [1])
    built = build(parse(SHARED))
    edge, weight = notes(built)
    assert "operand 1, 's'" in edge and "'w'" in weight
    assert built.training.partial == ["w"]
    assert differences(built)[0] == "skipped"
    x, t = np.float32([[1, -1], [0.5, 2], [-1, 0]]), np.float32([[1, 0], [0, 1], [1, 1]])
    w = torch.tensor([[1.0, 2], [3, 4]], requires_grad=True)
    h = torch.tensor(x) @ w
    torch.nn.functional.mse_loss(h * torch.sigmoid(h).detach(), torch.tensor(t)).backward()
    found = Executor(built.model, fallback=False)({"x": x, "label": t})
    np.testing.assert_allclose(found["w_grad"], w.grad.numpy(), 1e-5)


def test_the_proof_leaves_out_what_is_partial_and_keeps_the_rest() -> None:
    registry.stop_gradient("Sigmoid", [0])
    built = build(parse(GATED), Options(grad_of_input=("x",)))
    assert built.training.partial == ["x"]
    status, detail = differences(built)
    assert status == "passed" and "without x" in detail
    assert describe(built.model).partial == ("x",)


def test_a_gradient_of_which_all_paths_are_stopped_is_zero_and_says_so() -> None:
    registry.stop_gradient("Sigmoid", [0])
    weights = "float[2] b = {1, 2}"
    built = build(parse("k = Sigmoid(x) y = Add(k, b)", weights), Options(grad_of_input=("x",)))
    (zero,) = (caution for caution in built.training.cautions if caution.kind == "zero gradient")
    assert zero.subject == "x" and "stopped" in zero.text
    x = np.float32([[1, 2]])
    assert not Executor(built.model)({"x": x, "label": x})["x_grad"].any()


def test_losses_definitions_and_rules_keep_their_edges() -> None:
    """The mean squared error is a Mul, so are the definition of Swish and the rule of Sigmoid."""
    registry.stop_gradient("Mul", [0, 1])
    built = build(parse("h = MatMul(x, w) y = Sigmoid(h)"))
    assert not built.training.partial and differences(built)[0] == "passed"
    registry.definition("Twice", domain="my.ops")(lambda op, x: x * 2.0)
    model = parse("h = MatMul(x, w) y = my.ops.Twice(h)")
    model.opset_import.add(domain="my.ops", version=1)
    assert build(model).training.trained == ["w"]


def test_the_same_value_at_an_open_operand_has_its_gradient() -> None:
    registry.stop_gradient("Mul", [1])
    text = '<ir_version: 8, opset_import: ["": 18]> g (double[3] x) => (double[3] y) { y = Mul(x, x) }'
    x, g = np.array([1.0, -2.0, 3.0]), np.array([1.0, 1.0, 2.0])
    backward = with_gradient(onnx.parser.parse_model(text), ["x"], ["y"], "g_")
    np.testing.assert_array_equal(Executor(backward)({"x": x, "g_y": g})["g_grad_x"], g * x)


def test_an_operator_of_which_all_operands_are_stopped_needs_no_rule() -> None:
    registry.stop_gradient("Oracle", [0], domain="my.ops")
    model = parse("h = MatMul(x, w) k = my.ops.Oracle(h) y = Add(h, k)", "float[2, 2] w = {1, 2, 3, 4}, float[N, 2] k")
    model.opset_import.add(domain="my.ops", version=1)
    built = build(model)
    assert built.training.trained == ["w"] == built.training.partial
    assert any("my.ops::Oracle" in note for note in notes(built))


def test_a_definition_can_not_hide_a_stopped_edge() -> None:
    registry.definition("Gate", domain="my.ops")(lambda op, a, b: a * op.Sigmoid(b))
    registry.stop_gradient("Gate", [1], domain="my.ops")
    model = parse("h = MatMul(x, w) y = my.ops.Gate(h, h)")
    model.opset_import.add(domain="my.ops", version=1)
    with raises(UnsupportedError, "refused", "Gate_y", "my.ops::Gate"):
        build(model)


def test_a_stopped_edge_in_a_branch() -> None:
    registry.stop_gradient("Mul", [1])
    text = """<ir_version: 10, opset_import: ["": 18]>
        g (float[N, 2] x, bool c) => (float[N, 2] y) <float[2, 2] w = {1, 2, 3, 4}, float[2] b = {1, 2}> {
          h = MatMul(x, w)
          k = If(c) <then_branch = t () => (p) { s = Sigmoid(h) p = Mul(h, s) },
                     else_branch = e () => (q) { q = Identity(h) }>
          y = Add(k, b) }"""
    built = build(onnx.parser.parse_model(text))
    assert built.training.trained == ["w", "b"] and built.training.partial == ["w"]
    assert "operand 1" in notes(built)[0]
    status, detail = differences(built)
    assert status == "passed" and "without w" in detail


def test_a_scope_forgets_stopped_edges() -> None:
    with registry.scoped():
        registry.stop_gradient("Mul", [1])
        registry.stop_gradient("Mul", [0])
        assert list(registry.all_stopped()) == [("", "Mul", frozenset({0, 1}))]
    assert not list(registry.all_stopped())


@pytest.mark.parametrize(
    "op_type, inputs, domain, what",
    [
        ("Mul", [2], "", ("wrong_value", "2")),
        ("Mul", [-1], "", ("wrong_value", "Mul", "-1")),
        ("Mul", [], "", ("wrong_value", "Mul")),
        ("Mul", ["a"], "", ("wrong_value", "Mul", "a")),
        ("Mull", [0], "", ("unknown_name",)),
        ("Upsample", [0], "", ("conflict",)),
    ],
)
def test_what_can_not_be_stopped_is_refused(
    op_type: str, inputs: list[int], domain: str, what: tuple[str, ...]
) -> None:
    code, *facts = what
    with raises(OnnxgradError, code, "stop_gradient", *facts) as caught:
        registry.stop_gradient(op_type, inputs, domain=domain)
    assert caught.value.hint
    assert not list(registry.all_stopped())
