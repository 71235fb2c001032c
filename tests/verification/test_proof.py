"""The proof itself: it passes what is right and fails what is wrong, in float64 and in float32."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxgrad_cli.autodiff import registry
from onnxgrad_cli.builder import build
from onnxgrad_cli.execution import observation, session
from onnxgrad_cli.execution.executor import Executor, to_double
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.metadata import describe
from onnxgrad_cli.options import LoraSpec, Options
from onnxgrad_cli.verification.case import CheckOutcome
from onnxgrad_cli.verification.findings import STILL
from onnxgrad_cli.verification.proof import prove
from onnxgrad_cli.verification.proof_checks import ORIGINAL
from onnxgrad_cli.verification.verdict import NOT_PROVED, PROVED, Proof
from onnxgrad_cli.verification.written_file import Ran

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
    assert [step.status for step in proof.steps] == ["passed"] * 7


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


def test_a_gradient_of_another_shape_than_its_weight_fails() -> None:
    """As where a model that was trained on is changed: labels of more columns stretch what was a vector."""
    model = build(onnx.load(SAMPLES / "linear_regression.onnx")).model
    label = next(value for value in model.graph.input if value.name == "label")
    label.type.tensor_type.shape.dim[1].dim_param = "batch"
    proof = prove(model, describe(model))
    assert proof.status == "failed"
    assert all(each in proof.steps[-1].detail for each in ("'fc.weight'", "[2, 3]", "[1, 3]"))


def test_a_gradient_of_nothing_may_be_of_any_shape() -> None:
    """As of an empty cache, whose head size the file leaves open, and onnxruntime does not ask for."""
    text = """<ir_version: 10, opset_import: ["" : 21, "com.microsoft": 1]>
    g (float[1, 2, 64] x, float[1, 1, past, size] k, float[1, 1, past, size] v) => (float[1, 2, 32] y)
    <float[64] w = {WEIGHTS}, int32[1] ends = {1}, int32 total = {2}> {
        h = Mul(x, w)
        y, keys, values = com.microsoft.GroupQueryAttention<num_heads = 2, kv_num_heads = 1>(h, , , k, v, ends, total)
    }"""
    model = onnx.parser.parse_model(text.replace("WEIGHTS", ", ".join(["0.5", "-1.5"] * 32)))
    built = build(model, Options(grad_of_input=("k",)))
    proof = prove(built.model, describe(built.model), original=model, sizes={"past": 0, "size": 8})
    assert proof.status == "passed", proof.why


def test_float32_alone_finds_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxgrad_cli.execution.double.to_double", _refuse)
    assert proof_of("Tanh").status == "passed"
    assert "float32" in proof_of("Tanh").executor
    with registry.scoped():
        registry.rule("Tanh", override=True)(lambda op, g, y, x: g * (1 - y))
        model = build(parse("Tanh")).model
        proofs = [prove(model, describe(model), original=parse("Tanh"), seed=seed) for seed in range(5)]
    assert PROVED not in [proof.verdict for proof in proofs]  # on some data, float32 takes it for right
    assert sum(proof.failed for proof in proofs) >= 3


def test_what_float32_passes_by_chance_is_looked_at_on_other_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that is a constant, and right on the data of one look."""
    monkeypatch.setattr("onnxgrad_cli.execution.double.to_double", _refuse)
    text = '<ir_version: 10, opset_import: ["": 18]> g (float[N, 4] x) => (float[N, 4] y) <float[1] w = {1.5}>'
    model = build(onnx.parser.parse_model(f"{text} {{ y = Mul(x, w) }}"), Options(train=("w",))).model
    runs: list[Ran] = []
    assert prove(model, describe(model), keep=runs.append).verdict == PROVED
    wrong = onnx.ModelProto()
    wrong.CopyFrom(model)
    for node in wrong.graph.node:
        node.output[:] = ["another" if name == "w_grad" else name for name in node.output]
    value = numpy_helper.from_array(runs[0].outputs["w_grad"])
    wrong.graph.node.append(onnx.helper.make_node("Constant", [], ["w_grad"], value=value))
    proof = prove(wrong, describe(wrong))
    assert proof.verdict == NOT_PROVED and "other data:" in proof.why


def scaled(activation: str, scale: float, *weights: str) -> onnx.ModelProto:
    model = parse(activation)
    for tensor in model.graph.initializer:
        if tensor.name in weights:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(scale), tensor.name))
    return model


@pytest.mark.parametrize("activation", ["Relu", "Abs", "Tanh"])
@pytest.mark.parametrize(
    ("scale", "weights"),
    [(0, ("w1", "b1")), (0, ("w1", "b1", "w2")), (0, ("w2",)), (1e-20, ("w1",)), (1e-20, ("w1", "b1", "w2"))],
)
@pytest.mark.thinned(8, 2)
def test_weights_next_to_zero_are_proved_at_every_seed(activation: str, scale: float, weights: tuple[str, ...]) -> None:
    """They lie on kinks, or no step that is in proportion to them shows in the loss."""
    original = scaled(activation, scale, *weights)
    model = build(original).model
    proofs = [prove(model, describe(model), original=original, seed=seed) for seed in range(6)]
    assert [proof.verdict for proof in proofs] == ["proved"] * 6


@pytest.mark.parametrize("scale", [0, 1e-20])
def test_a_wrong_gradient_fails_where_weights_are_next_to_zero(scale: float) -> None:
    with registry.scoped():
        registry.rule("Relu", override=True)(lambda op, g, y, x: g)
        original = scaled("Relu", scale, "w1", "b1")
        model = build(original).model
        assert all(prove(model, describe(model), original=original, seed=seed).failed for seed in range(3))


@pytest.mark.slow
def test_gradients_that_vanish_do_not_fail() -> None:
    """Of those of the first of many layers, nothing shows in a loss of any precision."""
    layers = [f"h{i} = MatMul(a{i}, w{i}) a{i + 1} = Tanh(h{i})" for i in range(40)]
    text = f'<ir_version: 10, opset_import: ["": 18]> g (float[N, 4] a0) => (float[N, 4] y) {{ {" ".join(layers)}'
    original = onnx.parser.parse_model(f"{text} s = Add(a40, b) y = Tanh(s) }}")
    rng = np.random.default_rng(0)
    arrays = {**{f"w{i}": 0.15 * rng.standard_normal((4, 4)) for i in range(40)}, "b": rng.standard_normal(4)}
    original.graph.initializer.extend(numpy_helper.from_array(x.astype(np.float32), n) for n, x in arrays.items())
    model = build(original).model
    for seed in range(3):
        proof = prove(model, describe(model), original=original, seed=seed)
        assert proof.status == "passed", proof.steps[-1]


def test_a_fed_gradient_of_the_loss_counts() -> None:
    model = build(parse("Tanh"), Options(yield_="input")).model
    for data in ({}, {"loss_grad": np.array(1024, np.float32)}):
        proof = prove(model, describe(model), original=parse("Tanh"), data=data)
        assert [step.status for step in proof.steps] == ["passed"] * 7, proof.steps
    with registry.scoped():
        registry.rule("Tanh", override=True)(lambda op, g, y, x: g * (1 - y))
        model = build(parse("Tanh"), Options(yield_="input")).model
    assert prove(model, describe(model)).failed


def _refuse(model: onnx.ModelProto) -> onnx.ModelProto:
    raise NotImplementedError


@pytest.mark.parametrize("name", ["digits_mlp", "digits_cnn", "tiny_transformer", "symbolic"])
@pytest.mark.thinned(2)
def test_float32_gives_no_false_alarm(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxgrad_cli.execution.double.to_double", _refuse)
    options = Options(losses=(LossSpec("cross-entropy"),))
    model = build(onnx.load(SAMPLES / f"{name}.onnx"), options).model
    for seed in range(3):
        proof = prove(model, describe(model), seed=seed)
        assert proof.status == "passed", proof.steps[-1]


def test_gradients_that_are_noise_in_float32_are_judged_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where two looks find noise alone, as behind a Sigmoid near zero, the same graph is judged in float64."""
    for look in ("_here", "_elsewhere"):
        monkeypatch.setattr(
            f"onnxgrad_cli.verification.checks.agreement.{look}", lambda case: CheckOutcome("skipped", "noise")
        )
    proof = proof_of("Tanh")
    assert (proof.verdict, "in float64: " in proof.steps[-1].detail) == ("proved", True), proof.steps
    with registry.scoped():
        registry.rule("Tanh", override=True)(lambda op, g, y, x: g * (1 - y))
        model = build(parse("Tanh")).model
        proofs = [prove(model, describe(model), original=parse("Tanh"), seed=seed) for seed in range(5)]
    assert PROVED not in [proof.verdict for proof in proofs]  # on some data, float32 takes it for right
    assert sum(proof.failed for proof in proofs) >= 3


@pytest.mark.parametrize("exact", [True, False])
def test_values_that_count_as_constants_stay_where_weights_move(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """DoRA takes the norms of adapted weights for constants: its gradients are not slopes of the whole loss."""
    if not exact:
        monkeypatch.setattr("onnxgrad_cli.execution.double.to_double", _refuse)
    original = parse("Tanh")
    model = build(original, Options(lora=LoraSpec(2, 4.0), lora_dora=True)).model
    roles = describe(model)
    proof = prove(model, roles, original=original)
    assert roles.held and proof.verdict == PROVED, proof.why
    if exact:
        model.metadata_props.clear()
        assert prove(model, replace(roles, held=()), original=original).failed


def test_a_constant_scale_leaves_a_model_to_onnxruntime_in_float64() -> None:
    """It dequantizes in float32, and the rest is float64; a scale that something else reads is float64 itself."""
    text = """
    <ir_version: 10, opset_import: ["": 21]>
    g (float[2, 3] x) => (float[2, 3] y)
        <int8[3, 3] q = {1, -2, 3, 4, 5, -6, 7, 8, 9}, float s = {0.1}>
    { w = DequantizeLinear(q, s) h = MatMul(x, w) y = Tanh(h) }
    """
    x = np.array([[0.1, 0.2, 0.3], [0.3, -0.1, 0.4]])
    double = to_double(onnx.parser.parse_model(text))
    (y,) = Executor(double, fallback=False)({"x": x}).values()
    q = np.array([[1, -2, 3], [4, 5, -6], [7, 8, 9]])
    np.testing.assert_allclose(y, np.tanh(x @ (q * np.float32(0.1)).astype(np.float64)), rtol=1e-7)
    assert y.dtype == np.float64
    shared = to_double(onnx.parser.parse_model(text.replace("Tanh(h)", "Mul(h, s)")))
    (s,) = (tensor for tensor in shared.graph.initializer if tensor.name == "s")
    assert s.data_type == onnx.TensorProto.DOUBLE


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
    model = build(parse("Tanh")).model
    monkeypatch.setattr("onnxgrad_cli.verification.proof_checks.PROVABLE", 10)
    proof = prove(model, describe(model))
    assert proof.status == "skipped"
    assert "--verify" in proof.reason
    assert prove(model, describe(model), force=True).status == "passed"


def test_models_that_would_not_fit_into_memory_are_not_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(parse("Tanh")).model
    monkeypatch.setattr("onnxgrad_cli.verification.proof_checks.MAX_WEIGHT_BYTES", 10)
    assert prove(model, describe(model)).verdict == "proved"
    monkeypatch.setattr("onnxgrad_cli.verification.proof_checks.free_memory", lambda: 50)
    assert "free memory" in prove(model, describe(model)).why
    assert prove(model, describe(model), force=True).verdict == "proved"


def test_costly_models_are_proved_at_a_batch_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that needs two samples is proved with two."""
    monkeypatch.setattr("onnxgrad_cli.verification.case.LONG_RUN_OPERATIONS", 10)
    model = build(parse("Tanh")).model
    proof = prove(model, describe(model), operations=11)
    assert proof.verdict == "proved" and "x [1, 4]" in next(step.detail for step in proof.steps if step.name == "runs")
    two = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 18]>
        g (float[N, 4] x) => (float[M, 4] y) <float[4] w = {1, 2, 3, 4}, int64[1] second = {1}>
        { row = Gather(x, second) h = Mul(row, w) y = Tanh(h) }""")
    model = build(two).model
    proof = prove(model, describe(model), operations=11)
    assert proof.verdict == "proved" and "x [2, 4]" in next(step.detail for step in proof.steps if step.name == "runs")


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
    monkeypatch.setattr(observation, "MAX_NODES", 3)
    monkeypatch.setattr(session, "OPTIMIZED_FOR_FEW_RUNS", 3)
    proof = prove(model, roles)
    assert proof.status == "skipped" and "nodes; --verify" in proof.reason
    assert prove(model, roles, force=True).status == "passed"


def test_nodes_of_bodies_count(monkeypatch: pytest.MonkeyPatch) -> None:
    text = """<ir_version: 10, opset_import: ["": 21]> g (float[2] x, bool c) => (float[2] y) {
        y = If(c) <then_branch = a () => (float[2] u) { t = Neg(x) u = Neg(t) },
          else_branch = b () => (float[2] v) { w = Neg(x) v = Neg(w) }>
    }"""
    monkeypatch.setattr(observation, "MAX_NODES", 4)
    assert observation.too_large(onnx.parser.parse_model(text)) == "5 nodes"


FAR = """
<ir_version: 10, opset_import: ["" : 18]> g (float[N, 4] x) => (float[N, 3] y) <float far = {FAR}>
{ h = MatMul(x, w) a = Add(h, far) b = Sub(a, far) y = Tanh(b) }
"""


@pytest.mark.parametrize(("far", "verdict"), [("1e6", "proved"), ("1e8", "not_proved")])
def test_a_right_gradient_is_not_failed_where_float32_loses_the_digits(far: str, verdict: str) -> None:
    """What is added and taken off again makes a staircase of the loss in float32, on which every slope is zero."""
    original = onnx.parser.parse_model(FAR.replace("FAR", far))
    weight = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    original.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    model = build(original).model
    proof = prove(model, describe(model), original=original)
    assert (proof.verdict, "float64" in proof.steps[-1].detail) == (verdict, True), proof.steps
    with registry.scoped():
        registry.rule("Tanh", override=True)(lambda op, g, y, x: g * (1 - y))
        model = build(original).model
    assert prove(model, describe(model), original=original).failed


def test_gradients_that_are_all_zero_prove_nothing() -> None:
    original = scaled("Relu", 1, "w2")
    for tensor in original.graph.initializer:
        if tensor.name == "b1":
            tensor.CopyFrom(numpy_helper.from_array(np.full(3, -1e3, np.float32), "b1"))
    model = build(original, Options(train=("w*", "b1"))).model
    proof = prove(model, describe(model), original=original)
    assert proof.verdict == "not_proved" and STILL in proof.why
    (bias,) = (tensor for tensor in original.graph.initializer if tensor.name == "w2")
    original.graph.initializer.append(numpy_helper.from_array(numpy_helper.to_array(bias)[0], "b2"))
    original.graph.node.append(onnx.helper.make_node("Add", ["y", "b2"], ["z"]))
    original.graph.output[0].name = "z"
    model = build(original).model
    proof = prove(model, describe(model), original=original)
    assert proof.verdict == "proved", proof.why
    detail = proof.steps[-1].detail
    assert "1 of 4 tensors" in detail and ": w1, b1, w2;" in detail.partition("; zero,")[2], detail


def test_a_model_that_does_not_run_on_random_data_is_no_failure() -> None:
    """Without its original nothing says whether other data would do; with all data given, there are no others."""
    original = onnx.parser.parse_model("""
    <ir_version: 10, opset_import: ["" : 18]> g (float[N, 4] x, int64[2] less) => (float[N, 6] y)
        <int64 ten = {10}> { h = MatMul(x, w) size = Sub(ten, less) r = Reshape(h, size) y = Tanh(r) }
    """)
    weight = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    original.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    model = build(original).model
    roles = describe(model)
    proof = prove(model, roles)
    assert proof.verdict == "not_proved" and "--test-data" in proof.why and "less int64[2]" in proof.steps[-1].detail
    data = {"x": np.ones((3, 4), np.float32), "less": np.array([7, 4])}
    data |= {name: np.ones((3, 6), np.float32) for name in roles.sampled if name not in data}
    assert prove(model, roles, data=data).verdict == "proved"
    assert prove(model, roles, data={**data, "less": np.array([7, 5])}).failed


@pytest.mark.parametrize(
    ("activation", "weight", "data", "named"),
    [
        ("Tanh", "nan", "1", "the weight 'w1'"),
        ("Tanh", "0.5", "nan", "the input 'x'"),
        ("Identity", "inf", "1", "the weight 'w1'"),
        ("Log", "-0.5", "1", "'a', an output of Log"),
    ],
)
def test_a_loss_that_is_not_finite_is_told_from_where_on(activation: str, weight: str, data: str, named: str) -> None:
    original = parse(activation)
    original.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.full((4, 3), float(weight), np.float32), "w1"))
    model = build(original).model
    proof = prove(model, describe(model), original=original, data={"x": np.full((2, 4), float(data), np.float32)})
    assert proof.verdict == "not_proved" and f"from {named}" in proof.why, proof.why
    assert proof.steps[-1].name == ORIGINAL[0]  # nothing follows from a loss of such data


def test_a_nan_that_comes_of_an_infinite_weight_is_told_by_its_name() -> None:
    """The constants of the loss, of which one is NaN, are in no model of the user's."""
    text = """<ir_version: 10, opset_import: ["": 18]> g (float[n, 2] x) => (float[n, 3] y)
        <float[2, 3] w = {1, 2, 3, 4, 5, 6}, float[3] b = {1, 2, 3}> { h = MatMul(x, w) y = Add(h, b) }"""
    original = onnx.parser.parse_model(text)
    original.graph.initializer[1].CopyFrom(numpy_helper.from_array(np.float32([np.inf, 0, 0]), "b"))
    model = build(original, Options(losses=(LossSpec("cross-entropy"),))).model
    proof = prove(model, describe(model))
    assert proof.verdict == "not_proved" and "weight 'b'" in proof.why, proof.why


def test_an_axis_of_any_name_gets_the_length_of_the_stored_vector_that_is_added() -> None:
    original = onnx.parser.parse_model("""
    <ir_version: 10, opset_import: ["" : 18]> g (float[N, C] x) => (float[N, C] y) <float[7] b = {1, 2, 3, 4, 5, 6, 7}>
        { h = Add(x, b) y = Tanh(h) }
    """)
    model = build(original).model
    assert prove(model, describe(model), original=original).verdict == "proved"


def test_a_float_that_is_a_size_leaves_gradients_unproved() -> None:
    """Its last digits decide how many there are, where it is turned into a whole number."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        g (int64[3] i) => (float[3, 10] y) <float depth = {10}, float[2] values = {1, 3}> {
            y = OneHot(i, depth, values)
        }""")
    built = build(model, Options(train=("*",)))
    proof = prove(built.model, describe(built.model), original=model)
    assert proof.verdict == "not_proved" and "last digits" in str(proof)
