"""The loss pass: several losses, losses from files, penalties, sample weights, labels, and every way to ask wrongly."""

import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper, numpy_helper, parser

from onnxgrad_cli import losses
from onnxgrad_cli.builder import TrainingModel, build
from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.ir.types import shape_of
from onnxgrad_cli.losses import parse_loss
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.parameters.untrained import UNTRAINED
from tests.facts import raises, raises_as

RNG = np.random.default_rng(0)
W, V = RNG.standard_normal((3, 4)), RNG.standard_normal((3, 2))


def model(last: str = "Identity", opset: int = 18, dtype: type = np.float64) -> onnx.ModelProto:
    """Two outputs of one input: p = x w, [batch, 4], through `last`; q = x v, [batch, 2]."""
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["product"]),
            helper.make_node(last, ["product"], ["p"]),
            helper.make_node("MatMul", ["x", "v"], ["q"]),
        ],
        "g",
        [helper.make_tensor_value_info("x", kind, ["batch", 3])],
        [
            helper.make_tensor_value_info("p", kind, ["batch", 4]),
            helper.make_tensor_value_info("q", kind, ["batch", 2]),
        ],
        [numpy_helper.from_array(W.astype(dtype), "w"), numpy_helper.from_array(V.astype(dtype), "v")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def built(*specs: str, model: onnx.ModelProto | None = None, **keywords) -> TrainingModel:
    return build(model or globals()["model"](), Options(losses=tuple(map(parse_loss, specs)), **keywords))


def run(found: TrainingModel, **feeds: np.ndarray) -> dict[str, np.ndarray]:
    proto = found.model
    onnx.checker.check_model(proto, full_check=True)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def tensors(*arrays: np.ndarray) -> list[torch.Tensor]:
    return [torch.tensor(array, requires_grad=array.dtype.kind == "f") for array in arrays]


X, Y, C = RNG.standard_normal((5, 3)), RNG.standard_normal((5, 4)), np.array([0, 1, 1, 0, 1])


def refused(*specs: str, match: str = "", facts: tuple[str, ...] = (), hint: str = "", **keywords) -> None:
    """Expect an error with these facts or, of modules outside the passes, with a pattern in its message."""
    with raises_as(UsageError, facts or match) as raised:
        built(*specs, **keywords)
    assert hint in (raised.value.hint or "")


# -- several losses and penalties ----------------------------------------------------------------------


def test_several_losses_with_weights() -> None:
    found = built("mse:p:y:0.5", "cross-entropy:q:c:2")
    outputs = run(found, x=X, y=Y, c=C)
    w, v = tensors(W, V)
    x = torch.tensor(X)
    expected = 0.5 * F.mse_loss(x @ w, torch.tensor(Y)) + 2 * F.cross_entropy(x @ v, torch.tensor(C))
    expected.backward()
    np.testing.assert_allclose(outputs["loss"], expected.item())
    np.testing.assert_allclose(outputs["w_grad"], w.grad.numpy())
    np.testing.assert_allclose(outputs["v_grad"], v.grad.numpy())
    assert found.training.labels == ["y", "c"]
    assert found.graph.input_names == ["x", "y", "c", "w", "v"]
    assert [shape_of(v.type) for v in found.model.graph.input][1:3] == [("batch", 4), ("batch",)]


def test_two_losses_share_a_label_of_one_type() -> None:
    outputs = run(built("mse:p:y", "mae:p:y:0.1"), x=X, y=Y)
    expected = np.mean((X @ W - Y) ** 2) + 0.1 * np.mean(np.abs(X @ W - Y))
    np.testing.assert_allclose(outputs["loss"], expected)


def test_two_labels_of_one_name_and_two_types_are_refused() -> None:
    refused("mse:p", "cross-entropy:q", facts=("conflict", "label", "4", "int64"), hint="NAME:OUTPUT:LABEL")


@pytest.mark.parametrize("opset", [13, 18])
def test_penalties(opset: int) -> None:
    found = built("mse:p:y", "mse:q:z", model=model(opset=opset), l1=0.1, l2=0.01, freeze=("v",))
    outputs = run(found, x=X, y=Y, z=X @ V)
    (w,) = tensors(W)
    expected = F.mse_loss(torch.tensor(X) @ w, torch.tensor(Y)) + 0.1 * w.abs().sum() + 0.01 * (w * w).sum()
    expected.backward()
    np.testing.assert_allclose(outputs["loss"], expected.item())
    np.testing.assert_allclose(outputs["w_grad"], w.grad.numpy())
    assert "v_grad" not in outputs


def test_penalties_of_float16_weights_do_not_overflow() -> None:
    found = built("mse:p:y", model=model(dtype=np.float16), l2=1.0)
    assert run(found, x=np.full((5, 3), 1, np.float16), y=np.full((5, 4), 300, np.float16))["loss"].dtype == np.float32


def test_the_identity_of_a_scalar_is_named_loss() -> None:
    text = '<ir_version: 10, opset_import: ["":18]> g (double[n] x) => (double y) <double[1] w = {2}> '
    found = built(
        "identity", model=parser.parse_model(text + "{ z = Mul(x, w) y = ReduceSum<keepdims=0>(z) }"), train=("w",)
    )
    outputs = run(found, x=np.array([1.0, 2.0]))
    assert outputs["loss"] == 6 and outputs["w_grad"] == [3]
    assert found.training.labels == []


def test_the_loss_is_named_by_its_last_node() -> None:
    nodes = [node for node in built("mse").model.graph.node if "loss" in node.output]
    assert [node.op_type for node in nodes] == ["ReduceMean"]


def test_the_name_loss_may_be_taken() -> None:
    taken = model()
    taken.graph.node[0].name = "loss"
    found = built("mse", model=taken)
    assert found.training.loss == "loss_1" and "loss_1" in run(found, x=X, label=Y)


def test_labels_come_before_weights_that_are_inputs_already() -> None:
    old = model()
    old.graph.input.insert(0, helper.make_tensor_value_info("w", TensorProto.DOUBLE, [3, 4]))
    assert built("mse:p:y", model=old).graph.input_names == ["x", "y", "w"]


# -- sample weights ------------------------------------------------------------------------------------


def test_one_sample_weight_serves_every_loss() -> None:
    found = built("mse:p:y", "cross-entropy:q:c", sample_weight="share")
    share = np.array([0.0, 1.0, 2.0, 0.5, 1.0])
    outputs = run(found, x=X, y=Y, c=C, share=share)
    x, s = torch.tensor(X), torch.tensor(share)
    first = (F.mse_loss(x @ torch.tensor(W), torch.tensor(Y), reduction="none") * s[:, None]).mean()
    second = (F.cross_entropy(x @ torch.tensor(V), torch.tensor(C), reduction="none") * s).mean()
    np.testing.assert_allclose(outputs["loss"], first + second)
    assert found.training.sample_weight == "share"
    assert shape_of(found.graph.types["share"]) == ("batch",)


def test_sample_weight_of_a_scalar_is_refused() -> None:
    text = '<ir_version: 10, opset_import: ["":18]> g (double[n] x) => (double y) <double[1] w = {2}> '
    scalar = parser.parse_model(text + "{ z = Mul(x, w) y = ReduceSum<keepdims=0>(z) }")
    refused("identity", model=scalar, train=("w",), sample_weight="s", facts=("conflict", "sample_weight", "y"))


# -- losses from files -----------------------------------------------------------------------------------

HUBER = """
<ir_version: 10, opset_import: ["":%d]>
loss (%s[n, c] prediction, %s[n, c] label) => (%s value) <%s half = {0.5}>
{
    d = Sub(prediction, label)
    low = Constant<value = %s {-1.0}>()
    high = Constant<value = %s {1.0}>()
    near = Clip(d, low, high)
    scaled = Mul(near, half)
    rest = Sub(d, scaled)
    product = Mul(near, rest)
    value = ReduceMean<keepdims=0>(product)
}
"""


def saved(folder: Path, text: str, name: str = "my loss.onnx") -> str:
    onnx.save(parser.parse_model(text), folder / name)
    return str(folder / name)


def huber(folder: Path, opset: int = 18, kind: str = "double") -> str:
    return saved(folder, HUBER % (opset, *[kind] * 6))


@pytest.mark.parametrize(("theirs", "ours"), [(18, 18), (13, 18), (13, 20)])
def test_a_loss_from_a_file(tmp_path: Path, theirs: int, ours: int) -> None:
    found = built(f"{huber(tmp_path, theirs)}:p:y:3", model=model(opset=ours))
    outputs = run(found, x=X, y=Y)
    (w,) = tensors(W)
    expected = 3 * F.huber_loss(torch.tensor(X) @ w, torch.tensor(Y))
    expected.backward()
    np.testing.assert_allclose(outputs["loss"], expected.item())
    np.testing.assert_allclose(outputs["w_grad"], w.grad.numpy())
    assert found.graph.opset() == ours
    assert shape_of(found.graph.types["y"]) == ("batch", 4)


@pytest.mark.parametrize(("theirs", "ours"), [(18, 13), (20, 17)])
def test_the_model_is_raised_to_the_opset_of_a_newer_file(tmp_path: Path, theirs: int, ours: int) -> None:
    file = huber(tmp_path, theirs)
    found = built(f"{file}:p:y", model=model(opset=ours))
    outputs = run(found, x=X, y=Y)
    (w,) = tensors(W)
    expected = F.huber_loss(torch.tensor(X) @ w, torch.tensor(Y))
    expected.backward()
    np.testing.assert_allclose(outputs["loss"], expected.item())
    np.testing.assert_allclose(outputs["w_grad"], w.grad.numpy())
    assert found.graph.opset() == theirs
    (text,) = [caution.text for caution in found.training.cautions if caution.kind == "opset change"]
    assert re.findall(r"\d+", text) == [str(ours), str(theirs)]
    onnx.checker.check_model(found.model, full_check=True)


FILE = '<ir_version: 10, opset_import: ["":18]> g (%s) => (%s) { %s }'
PAIR = "double[n, c] p, double[n, c] y"
BAD = [
    (
        f"{PAIR}, double[n] extra",
        "double v",
        "d = Sub(p, y) e = ReduceMean<keepdims=0>(d) v = Sum(e, extra)",
        "'extra'",
    ),
    (PAIR, "double v, double[n, c] d", "d = Sub(p, y) v = ReduceMean<keepdims=0>(d)", "2 outputs"),
    (PAIR, "double[n, c] v", "v = Sub(p, y)", "not a float scalar"),
    (PAIR, "int64 v", "d = Sub(p, y) v = Size(d)", "not a float scalar"),
    ("int64[n, c] p, int64[n, c] y", "int64 v", "d = Sub(p, y) v = Size(d)", "not a float tensor"),
    (
        "double[n, 7] p, double[n, 7] y",
        "double v",
        "d = Sub(p, y) v = ReduceMean<keepdims=0>(d)",
        r"\[n, 7\].*\[batch, 4\]",
    ),
    ("double[n] p, double[n] y", "double v", "d = Sub(p, y) v = ReduceMean<keepdims=0>(d)", r"\[n\].*\[batch, 4\]"),
    (
        "double[n, c] p, double[n, 7] y",
        "double v",
        "d = Sub(p, y) v = ReduceMean<keepdims=0>(d)",
        "can't be applied to the output 'p'",
    ),
]


@pytest.mark.parametrize(("inputs", "outputs", "nodes", "match"), BAD)
def test_files_that_are_no_losses(tmp_path: Path, inputs: str, outputs: str, nodes: str, match: str) -> None:
    refused(saved(tmp_path, FILE % (inputs, outputs, nodes)), match=match)


# -- asked wrongly -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x", "w", "p", "product", ""])
def test_a_label_that_collides_is_refused(name: str) -> None:
    refused("mse", label=name, facts=("wrong_value", "label", *filter(None, [name])), hint="`label`")


def test_a_sample_weight_that_collides_is_refused() -> None:
    refused("mse:p:y", sample_weight="y", facts=("wrong_value", "sample_weight", "y"), hint="`sample_weight`")


def test_an_unknown_loss_is_refused_with_a_suggestion() -> None:
    refused("cross-entrpy", facts=("unknown_name", "cross-entrpy"), hint="cross-entropy")


def test_an_unknown_option_is_refused_with_a_suggestion() -> None:
    refused("huber", loss_options={"dleta": 1.0}, facts=("unknown_name", "dleta"), hint="delta")
    refused("mse", loss_options={"delta": 1.0}, facts=("unknown_name", "delta"))


def test_a_loss_that_does_not_fit_the_output_is_refused() -> None:
    text = '<ir_version: 10, opset_import: ["":18]> g (float[n] x) => (float[n] y) <float[1] w = {2}> { y = Mul(x, w) }'
    refused("cross-entropy", model=parser.parse_model(text), train=("w",), match="at least 2 axes", hint="classes")


def test_an_output_of_unknown_rank_is_refused() -> None:
    text = '<ir_version: 10, opset_import: ["":18]> g (float[n] x, int64[k] s) => (float[] y) <float[1] w = {2}> '
    unknown = parser.parse_model(text + "{ z = Mul(x, w) y = Reshape(z, s) }")
    unknown.graph.output[0].type.tensor_type.ClearField("shape")
    refused("mse", model=unknown, train=("w",), match="rank of output 'y' is unknown", hint="`shapes`")


@pytest.mark.parametrize(
    ("loss", "options", "match"),
    [
        ("huber", {"delta": 0}, "delta must be positive"),
        ("huber", {"delta": "wide"}, "delta takes a number, not 'wide'"),
        ("huber", {"delta": float("nan")}, "delta takes a number"),
        ("huber", {"delta": True}, "delta takes a number"),
        ("elastic", {"l1_ratio": 1.5}, "between 0 and 1"),
        ("poisson-nll", {"full": 1}, "full takes true or false"),
        ("cosine", {"axis": 0}, "must not be the batch"),
        ("cosine", {"axis": 2}, "the output has 2 axes"),
        ("cross-entropy", {"ignore_index": 1.5}, "`ignore_index` takes a whole number"),
        ("cross-entropy", {"label_smoothing": 2}, "between 0 and 1"),
        ("cross-entropy", {"class_weights": (1, 2)}, "2 values, but the output has 4"),
        ("cross-entropy", {"class_weights": (1, 2, 3, -1)}, "and no negative"),
        ("cross-entropy", {"class_weights": ((1, 2), (3, 4))}, "`class_weights` takes numbers"),
    ],
)
def test_options_that_do_not_fit(loss: str, options: dict[str, object], match: str) -> None:
    refused(loss, loss_options=options, match=match)


def test_class_weights_from_a_file(tmp_path: Path) -> None:
    np.save(tmp_path / "weights.npy", np.array([1.0, 3.0]))
    outputs = run(built("cross-entropy:q:c", loss_options={"class_weights": str(tmp_path / "weights.npy")}), x=X, c=C)
    expected = F.cross_entropy(torch.tensor(X @ V), torch.tensor(C), weight=torch.tensor([1.0, 3.0]).double())
    np.testing.assert_allclose(outputs["loss"], expected)


@pytest.mark.parametrize(
    ("loss", "last", "rather"),
    [
        ("cross-entropy", "Softmax", "log"),
        ("log", "LogSoftmax", "nll"),
        ("bce-logits", "Sigmoid", "bce"),
        ("mse", "Softmax", ""),
    ],
)
@pytest.mark.parametrize("named", [False, True])
def test_a_loss_behind_the_wrong_activation_is_cautioned(loss: str, last: str, rather: str, named: bool) -> None:
    proto = model(last)
    if named:  # the output gets its name from an Identity
        (node,) = (node for node in proto.graph.node if node.op_type == last)
        node.output[0], name = "inner", node.output[0]
        proto.graph.node.append(onnx.helper.make_node("Identity", ["inner"], [name]))
    cautions = built(loss, model=proto).training.cautions
    texts = [caution.text for caution in cautions if f"by {last}" in caution.text]
    assert [rather in text.split() for text in texts] == ([True] if rather else [])


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("mse", LossSpec("mse")),
        ("mse:out", LossSpec("mse", "out")),
        ("mse:out:y:0.5", LossSpec("mse", "out", "y", 0.5)),
        ("mse::y", LossSpec("mse", None, "y")),
        ("mse:::-2e-1", LossSpec("mse", None, None, -0.2)),
        (r"mse:dense/Add\:0:y\:0", LossSpec("mse", "dense/Add:0", "y:0")),
        ("a/loss.onnx", LossSpec("a/loss.onnx")),
        (r"C:\a\loss.onnx:out:y:2", LossSpec(r"C:\a\loss.onnx", "out", "y", 2.0)),
        ("my.onnx.d/loss.onnx:out", LossSpec("my.onnx.d/loss.onnx", "out")),
    ],
)
def test_parse_loss(text: str, spec: LossSpec) -> None:
    assert parse_loss(text) == spec


@pytest.mark.parametrize("text", ["", "msee", "mse:a:b:c", "mse:a:b:1:2", "mse:a:b:nan", "mse:a:b:inf", "l.onnx:a:b:x"])
def test_parse_loss_refuses(text: str) -> None:
    with pytest.raises(UsageError):
        parse_loss(text)


# -- one's own loss ------------------------------------------------------------------------------------------


def test_a_loss_of_ones_own() -> None:
    with losses.LOSSES.scoped():

        @losses.loss("quartic", options={"scale": "a factor"})
        def quartic(op, prediction, label, *, scale: "float" = 1.0):
            """The fourth power of the error."""
            return op.Pow(prediction - label, 4) * scale

        assert losses.LOSSES.lookup("quartic").summary == "The fourth power of the error."
        outputs = run(built("quartic:p:y", loss_options={"scale": 2}), x=X, y=Y)
        np.testing.assert_allclose(outputs["loss"], 2 * np.mean((X @ W - Y) ** 4))
        with pytest.raises(OnnxgradError, match="two losses are called"):
            losses.loss("quartic")(lambda op, p, y: p)
    with pytest.raises(UsageError):
        losses.LOSSES.lookup("quartic")


def test_an_option_without_a_line_is_refused() -> None:
    def undocumented(op, prediction, label, *, scale: "float" = 1.0):
        return prediction

    with losses.LOSSES.scoped(), pytest.raises(OnnxgradError, match="not declared"):
        losses.loss("undocumented")(undocumented)


@pytest.mark.parametrize(("axis", "told"), [(None, True), (1, True), (2, False)])
def test_an_axis_of_no_fixed_size_hardly_has_the_classes(axis: int | None, told: bool) -> None:
    """Of logits [batch, words, 4] the default axis is that of the words."""
    tagger = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 17]>
        tagger (float[batch, words, 2] x) => (float[batch, words, 4] p) <float[2, 4] w = {1, 2, 3, 4, 5, 6, 7, 8}>
        { p = MatMul(x, w) }""")
    given = {} if axis is None else {"class_axis": axis}
    cautions = built("cross-entropy", model=tagger, loss_options=given).training.cautions
    assert any("class-axis=-1" in str(caution) for caution in cautions) is told


def test_every_loss_says_what_it_is() -> None:
    for loss in losses.LOSSES:
        assert loss.summary.endswith(".") and len(loss.summary) < 120
        assert set(loss.rather.values()) <= {other.name for other in losses.LOSSES}


# -- the name of the label ---------------------------------------------------------------------------------------------


def with_a_label_of_its_own() -> onnx.ModelProto:
    """As scikit-learn's classifiers: an output 'label' that is no float."""
    given = model()
    given.graph.node.append(helper.make_node("ArgMax", ["p"], ["label"], axis=1, keepdims=0))
    given.graph.output.insert(0, helper.make_tensor_value_info("label", TensorProto.INT64, ["batch"]))
    return given


def test_a_default_label_that_is_taken_gets_another_name_and_it_is_told() -> None:
    two = Options(losses=(LossSpec("mse", output="p"), LossSpec("mae", output="p", weight=0.5)))
    training = build(with_a_label_of_its_own(), two).training
    assert training.labels == ["label_1"]
    assert training.judged == ["label_1", "label_1"]
    (told,) = [caution for caution in training.cautions if caution.kind != UNTRAINED]
    assert (told.kind, told.subject) == ("note", "label_1") and "'label'" in told.text


def test_a_label_that_was_named_is_not_renamed() -> None:
    for name, options in (("q", Options(label="q")), ("label", Options(losses=(LossSpec("mse", label="label"),)))):
        with raises(UsageError, "wrong_value", "label", name):
            build(with_a_label_of_its_own(), options)


def test_nothing_is_told_of_a_label_that_nothing_takes() -> None:
    training = build(with_a_label_of_its_own(), Options(losses=(LossSpec("identity"),))).training
    assert not training.labels
    assert [caution.kind for caution in training.cautions] == [UNTRAINED]


@pytest.mark.parametrize("head", ["Softmax", "LogSoftmax"])
def test_a_softmax_over_one_class_is_refused(head: str) -> None:
    text = '<ir_version: 10, opset_import: ["":18]> g (float[n, 3] x) => (float[n, 1] y) <float[3, 1] w = {1, 2, 3}> '
    one = parser.parse_model(text + f"{{ h = MatMul(x, w) y = {head}(h) }}")
    facts = ("wrong_shape", "2", "1", "y", "1", "1")
    refused("cross-entropy", model=one, facts=facts, hint=f"Sigmoid instead of the {head}")
