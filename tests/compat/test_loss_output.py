"""add_loss_output: each loss against numpy and scikit-learn, its gradient against central differences, what the older
function of this name got wrong, and every way to ask wrongly."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser

from onnxgrad_cli import LossSpec, Options
from onnxgrad_cli.builder import build
from onnxgrad_cli.compat import DerivativeOptions, add_loss_output, get_train_initializer, onnx_derivative
from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.ir.types import shape_of
from onnxgrad_cli.verification.gradients.gradcheck import directional
from tests.facts import raises

Array = np.ndarray
Arrays = dict[str, Array]
GOLDEN = Path(os.environ.get("ONNXGRAD_GOLDEN", Path(__file__).parents[3] / "shared" / "golden"))
RNG = np.random.default_rng(0)
N, COLUMNS, TARGETS = 6, 4, 3
X, T = RNG.standard_normal((N, COLUMNS)), RNG.standard_normal((N, TARGETS))
COEF, INTERCEPT = RNG.standard_normal((COLUMNS, TARGETS)), RNG.standard_normal(TARGETS)
WEIGHTS = np.array([1.0, 2.0, 0.0, 0.5, 3.0, 1.5])
CLASSES = np.array([0, 1, 1, 0, 2, 2])


def linear(
    coef: Array = COEF,
    intercept: Array = INTERCEPT,
    opset: int = 18,
    last: str = "Identity",
    outputs: tuple[str, ...] = ("y",),
    batch: str | int | None = "N",
) -> ModelProto:
    """y = last(x coef + intercept); `product` is another possible output."""
    kind = helper.np_dtype_to_tensor_dtype(coef.dtype)
    ir = 3 if opset < 9 else 8 if opset < 19 else 10
    weights = [numpy_helper.from_array(coef, "coef"), numpy_helper.from_array(intercept, "intercept")]
    inputs = [helper.make_tensor_value_info("x", kind, [batch, coef.shape[0]])]
    if ir == 3:
        inputs += [helper.make_tensor_value_info(w.name, kind, w.dims) for w in weights]
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "coef"], ["product"], name="MatMul"),
            helper.make_node("Add", ["product", "intercept"], ["sum"], name="Add"),
            helper.make_node(last, ["sum"], ["y"], name="last"),
        ],
        "linear",
        inputs,
        [helper.make_tensor_value_info(name, kind, [batch, coef.shape[1]]) for name in outputs],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir)


def run(model: ModelProto, **feeds: Array) -> Arrays:
    """All outputs by name, on onnxruntime; the model is valid."""
    onnx.checker.check_model(model, full_check=True)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def loss_of(model: ModelProto, **feeds: Array) -> float:
    loss = run(model, **feeds)["loss"]
    assert loss.shape == (1, 1)
    return float(loss[0, 0])


def names(values: Iterator[onnx.ValueInfoProto]) -> list[str]:
    return [value.name for value in values]


def softmax(z: Array) -> Array:
    e = np.exp(z - z.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


# -- the formulas ----------------------------------------------------------------------------------------------

D = X @ COEF + INTERCEPT - T
ELEMENTS = {
    "squared_error": ({}, D**2),
    "l2": ({}, D**2),
    "absolute_error": ({}, np.abs(D)),
    "l1": ({}, np.abs(D)),
    "elastic": ({}, 0.5 * np.abs(D) + 0.5 * D**2),
    "elastic uneven": ({"l1_weight": 0.2, "l2_weight": 3}, 0.2 * np.abs(D) + 3 * D**2),
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", [None, "sum", "mean"])
@pytest.mark.parametrize("score", ELEMENTS)
def test_errors_against_numpy(score: str, reduction: str | None, weighted: bool) -> None:
    options, elements = ELEMENTS[score]
    weight_name, feeds = ("weight", {"weight": WEIGHTS}) if weighted else (None, {})
    model = add_loss_output(linear(), score.split()[0], weight_name=weight_name, reduction=reduction, **options)
    elements = elements * WEIGHTS[:, None] if weighted else elements
    expected = elements.mean() if reduction == "mean" else elements.sum()
    assert loss_of(model, x=X, label=T, **feeds) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("opset", [7, 8, 9, 11, 12, 13, 15, 18, 21])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.thinned(3)
def test_opsets_and_types(opset: int, dtype: type) -> None:
    model = linear(COEF.astype(dtype), INTERCEPT.astype(dtype), opset)
    x, t, w = X.astype(dtype), T.astype(dtype), WEIGHTS.astype(dtype)
    d = (x @ COEF.astype(dtype) + INTERCEPT.astype(dtype)).astype(np.float64) - t
    expected = {
        "l2": (d**2 * WEIGHTS[:, None]).sum(),
        "l1": (np.abs(d) * WEIGHTS[:, None]).sum(),
        "elastic": ((np.abs(d) + d**2) / 2 * WEIGHTS[:, None]).sum(),
    }
    penalty = 0.1 * np.abs(COEF).sum() + 0.2 * (COEF**2).sum()
    for score, value in expected.items():
        result = add_loss_output(model, score, weight_name="w", penalty={"coef": {"l1": 0.1, "l2": 0.2}})
        assert max(entry.version for entry in result.opset_import) == max(opset, 13)
        found = run(result, x=x, label=t, w=w)
        assert found["y"].dtype == dtype
        assert found["loss"].dtype == (np.float32 if dtype == np.float16 else dtype)
        tolerance = {np.float16: 2e-3, np.float32: 1e-5, np.float64: 1e-12}[dtype]
        assert found["loss"][0, 0] == pytest.approx(value + penalty, rel=tolerance)


@pytest.mark.parametrize("opset", [7, 13, 18])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.thinned(6, 2)
def test_log_loss_of_opsets_and_types(opset: int, dtype: type) -> None:
    from sklearn.metrics import log_loss

    model = linear(COEF.astype(dtype), INTERCEPT.astype(dtype), opset, last="Softmax")
    result = add_loss_output(model, "log", eps=1e-4)
    expected = log_loss(CLASSES, softmax(X @ COEF + INTERCEPT))
    tolerance = {np.float16: 1e-2, np.float32: 1e-5, np.float64: 1e-9}[dtype]
    assert loss_of(result, x=X.astype(dtype), label=CLASSES[:, None]) == pytest.approx(expected, rel=tolerance)


def test_half_types_are_summed_in_float32() -> None:
    model = linear(np.ones((1, 1), np.float16), np.zeros(1, np.float16))
    x, t = np.full((100, 1), 100, np.float16), np.zeros((100, 1), np.float16)
    assert loss_of(add_loss_output(model), x=x, label=t) == 1e6  # float16 ends at 65504


@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4)])
@pytest.mark.parametrize("score", ["l2", "l1", "elastic"])
def test_outputs_of_any_rank(score: str, shape: tuple[int, ...]) -> None:
    info = [helper.make_tensor_value_info(name, TensorProto.DOUBLE, shape) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", info[:1], info[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    x, t = RNG.standard_normal(shape), RNG.standard_normal(shape)
    w = RNG.uniform(size=shape[:1])
    weighted = {"weight_name": "w"} if shape else {}
    result = add_loss_output(model, score, **weighted)
    by_row = w.reshape(-1, *[1] * (len(shape) - 1)) if shape else 1.0
    d = x - t
    elements = {"l2": d**2, "l1": np.abs(d), "elastic": (d**2 + np.abs(d)) / 2}[score] * by_row
    assert loss_of(result, x=x, label=t, **({"w": w} if shape else {})) == pytest.approx(elements.sum())


def log_of(p: Array, labels: Array, eps: float = 1e-6) -> Array:
    p = np.clip(p, eps, 1 - eps)
    return -np.log(p / p.sum(axis=1, keepdims=True))[np.arange(len(p)), labels]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", [None, "sum", "mean"])
@pytest.mark.parametrize("column", [True, False])
def test_log_against_numpy(column: bool, reduction: str | None, weighted: bool) -> None:
    weight_name, feeds = ("w", {"w": WEIGHTS}) if weighted else (None, {})
    model = add_loss_output(
        linear(last="Softmax"), "log", weight_name=weight_name, reduction=reduction, label_column=column
    )
    label = CLASSES[:, None] if column else CLASSES
    rows = log_of(softmax(X @ COEF + INTERCEPT), CLASSES) * (WEIGHTS if weighted else 1)
    expected = rows.sum() if reduction == "sum" else rows.mean()
    assert loss_of(model, x=X, label=label, **feeds) == pytest.approx(expected, rel=1e-12)


def test_log_clips_and_divides_by_the_sum_of_the_row() -> None:
    p = np.array([[0.0, 1.0], [1.0, 0.0], [0.2, 0.2], [1e-9, 0.5]])
    labels = np.array([0, 0, 1, 0])
    info = [helper.make_tensor_value_info(name, TensorProto.DOUBLE, ["n", 2]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", info[:1], info[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    for eps in (1e-6, 1e-3):
        found = loss_of(add_loss_output(model, "log", eps=eps), x=p, label=labels[:, None])
        by_hand = -(np.log(eps) + np.log(1 - eps) + np.log(0.5) + np.log(eps / (0.5 + eps))) / 4
        assert found == pytest.approx(by_hand, rel=1e-12)
    assert np.isnan(loss_of(add_loss_output(model, "log"), x=p, label=-np.ones((4, 1), np.int64)))


# -- scikit-learn ------------------------------------------------------------------------------------------------


def test_regression_against_scikit_learn() -> None:
    from sklearn.linear_model import LinearRegression
    from sklearn.metrics import mean_absolute_error, mean_squared_error

    target = X[:, :1] * 2 + T[:, :1]
    fitted = LinearRegression().fit(X, target)
    model = linear(fitted.coef_.T.copy(), fitted.intercept_)
    predicted = fitted.predict(X)
    total = WEIGHTS.sum()
    for score, metric in (("squared_error", mean_squared_error), ("absolute_error", mean_absolute_error)):
        result = add_loss_output(model, score, reduction="mean")
        assert loss_of(result, x=X, label=target) == pytest.approx(metric(target, predicted), rel=1e-12)
        result = add_loss_output(model, score, weight_name="w")
        expected = metric(target, predicted, sample_weight=WEIGHTS) * total
        assert loss_of(result, x=X, label=target, w=WEIGHTS) == pytest.approx(expected, rel=1e-12)


def test_log_against_scikit_learn() -> None:
    from sklearn.metrics import log_loss

    model = add_loss_output(linear(last="Softmax"), "log", reduction="sum", weight_name="w", eps=1e-12)
    expected = log_loss(CLASSES, softmax(X @ COEF + INTERCEPT), sample_weight=WEIGHTS) * WEIGHTS.sum()
    assert loss_of(model, x=X, label=CLASSES[:, None], w=WEIGHTS) == pytest.approx(expected, rel=1e-9)


def gradients(model: ModelProto, **feeds: Array) -> Arrays:
    """The gradients of the loss output, from a build in which that output is the loss."""
    copy = ModelProto()
    copy.CopyFrom(model)
    found = build(copy, Options(losses=(LossSpec("identity", "loss"),))).model
    return {name.removesuffix("_grad"): g for name, g in run(found, **feeds).items() if name.endswith("_grad")}


def test_ridge_regression_is_a_minimum_of_the_weighted_penalised_loss() -> None:
    from sklearn.linear_model import Ridge

    fitted = Ridge(alpha=0.7).fit(X, T, sample_weight=WEIGHTS)
    model = linear(fitted.coef_.T.copy(), fitted.intercept_)
    result = add_loss_output(model, weight_name="w", penalty={"coef": 0.7})
    found = gradients(result, x=X, label=T, w=WEIGHTS)
    assert set(found) == {"coef", "intercept"}
    for g in found.values():
        np.testing.assert_allclose(g, 0, atol=1e-9)


def test_logistic_regression_is_a_minimum_of_the_penalised_log_loss() -> None:
    from sklearn.linear_model import LogisticRegression

    fitted = LogisticRegression(C=0.8, tol=1e-10, max_iter=10_000).fit(X, CLASSES, sample_weight=WEIGHTS)
    model = linear(fitted.coef_.T.copy(), fitted.intercept_, last="Softmax")
    penalty = {"coef": {"l2": 0.5 / 0.8}}
    result = add_loss_output(model, "log", weight_name="w", penalty=penalty, reduction="sum", eps=1e-12)
    for g in gradients(result, x=X, label=CLASSES[:, None], w=WEIGHTS).values():
        np.testing.assert_allclose(g, 0, atol=1e-5)


def test_a_binary_classifier_that_gives_labels_and_probabilities() -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import log_loss

    classes = (CLASSES > 0).astype(np.int64)
    fitted = LogisticRegression().fit(X, classes)
    coef, intercept = np.hstack([-fitted.coef_.T, fitted.coef_.T]) / 2, np.r_[-fitted.intercept_, fitted.intercept_] / 2
    model = linear(coef, intercept, last="Softmax")
    model.graph.node.append(helper.make_node("ArgMax", ["y"], ["label"], axis=1, keepdims=0))
    model.graph.output.insert(0, helper.make_tensor_value_info("label", TensorProto.INT64, ["N"]))
    result = add_loss_output(model, "log", label_name="expected", output_index=1)
    found = run(result, x=X, expected=classes[:, None])
    assert list(found) == ["loss", "label", "y"]
    np.testing.assert_array_equal(found["label"], fitted.predict(X))
    np.testing.assert_allclose(found["y"], fitted.predict_proba(X), rtol=1e-6)
    assert found["loss"][0, 0] == pytest.approx(log_loss(classes, fitted.predict_proba(X)), rel=1e-6)


# -- the gradient ------------------------------------------------------------------------------------------------

ASKED = {
    "l2": ("l2", {}),
    "l1": ("l1", {}),
    "elastic": ("elastic", {"l1_weight": 0.2, "l2_weight": 0.7}),
    "log": ("log", {"eps": 1e-5}),
    "log of a vector": ("log", {"label_column": False}),
    "mean": ("l2", {"reduction": "mean"}),
}


@pytest.mark.parametrize("opset", [7, 13, 18])
@pytest.mark.parametrize("asked", ASKED)
def test_gradients_against_central_differences(asked: str, opset: int) -> None:
    score, options = ASKED[asked]
    last = "Softmax" if score == "log" else "Identity"
    penalty = {"coef": {"l1": 0.3, "l2": 0.4}, "intercept": 0.5}
    result = add_loss_output(
        linear(opset=opset, last=last), score, weight_name="w", penalty=penalty, output_index=0, **options
    )
    label = (CLASSES[:, None] if options.get("label_column", True) else CLASSES) if score == "log" else T
    found = gradients(result, x=X, label=label, w=WEIGHTS)
    point = {"coef": COEF, "intercept": INTERCEPT}

    def value(at: Arrays) -> float:
        moved = ModelProto()
        moved.CopyFrom(result)
        for tensor in moved.graph.initializer:
            tensor.CopyFrom(numpy_helper.from_array(at[tensor.name], tensor.name))
        return float(run(moved, x=X, label=label, w=WEIGHTS)["loss"][0, 0])

    rng = np.random.default_rng(1)
    for _ in range(2):
        assert directional(value, point, found, rng).error < 1e-7


def test_a_batch_without_a_name() -> None:
    named, unnamed = (add_loss_output(linear(batch=batch), "elastic", weight_name="w") for batch in ("N", None))
    expected, found = (gradients(model, x=X, label=T, w=WEIGHTS) for model in (named, unnamed))
    for name, g in found.items():
        np.testing.assert_allclose(g, expected[name], rtol=1e-12)


def test_onnx_derivative_takes_the_loss() -> None:
    result = add_loss_output(linear(), "elastic", penalty={"coef": 0.5})
    derived = onnx_derivative(
        result, options=DerivativeOptions.Loss, label="label", weights=["coef", "intercept"], inputs=[]
    )
    found = run(derived, x=X, label=T)
    expected = gradients(result, x=X, label=T)
    for name in ("coef", "intercept"):
        np.testing.assert_allclose(found[f"{name}_grad"], expected[name], rtol=1e-12)


# -- what the older function got wrong ---------------------------------------------------------------------------


def test_sample_weights_are_no_outer_product() -> None:
    d = np.array([1.0, 2.0, -1.0, 0.0, 3.0, -2.0])[:, None]
    w = np.array([1.0, 2.0, 3.0, 1.0, 0.5, 2.0])
    model = add_loss_output(linear(np.ones((1, 1)), np.zeros(1)), weight_name="w")
    assert loss_of(model, x=d, label=np.zeros((6, 1)), w=w) == 24.5  # and not 9.5 * 19 = 180.5
    with pytest.raises(Exception, match="rank"):
        run(model, x=d, label=np.zeros((6, 1)), w=w[:, None])


def test_other_outputs_are_kept_in_their_order() -> None:
    model = linear(outputs=("product", "y", "sum"))
    result = add_loss_output(model, output_index="y")
    assert names(result.graph.output) == ["loss", "product", "y", "sum"]
    assert result.graph.output[1:] == list(model.graph.output)
    found = run(result, x=X, label=T)
    np.testing.assert_allclose(found["product"], X @ COEF)
    np.testing.assert_allclose(found["loss"], [[(D**2).sum()]])
    for index in (0, 1):
        chosen = add_loss_output(model, output_index=index)
        expected = D + T - T - (0 if index else INTERCEPT)
        np.testing.assert_allclose(run(chosen, x=X, label=T)["loss"], [[(expected**2).sum()]])


@pytest.mark.parametrize(
    ("score", "option", "hint", "more"),
    [
        ("l2", "l1_weight", "l2", ["l2"]),
        ("squared_error", "delta", "squared_error", ["squared_error"]),
        ("elastic", "l1_wieght", "`l1_weight`", []),
        ("log", "espilon", "eps", []),
        ("log", "l1_weight", "eps, `label_column`", []),
    ],
)
def test_unknown_options_are_refused_not_ignored(score: str, option: str, hint: str, more: list[str]) -> None:
    with raises(UsageError, "unknown_name", *more, option) as caught:
        add_loss_output(linear(last="Softmax"), score, **{option: 1})
    assert hint in (caught.value.hint or "")


def test_the_default_is_a_sum_and_a_mean_can_be_asked_for() -> None:
    for score in ("l2", "l1", "elastic"):
        by_default, total, mean = (
            loss_of(add_loss_output(linear(), score, reduction=r), x=X, label=T) for r in (None, "sum", "mean")
        )
        assert by_default == total == pytest.approx(mean * T.size)
    model = linear(last="Softmax")
    by_default, total, mean = (
        loss_of(add_loss_output(model, "log", reduction=r), x=X, label=CLASSES[:, None]) for r in (None, "sum", "mean")
    )
    assert by_default == mean == pytest.approx(total / N)


def test_the_label_keeps_the_symbols_of_the_output() -> None:
    for score, dims in (("l2", ("N", TARGETS)), ("log", ("N", 1))):
        result = add_loss_output(linear(last="Softmax"), score, weight_name="w")
        types = {value.name: value.type for value in result.graph.input}
        assert names(result.graph.input) == ["x", "label", "w"]
        assert (shape_of(types["label"]), shape_of(types["w"])) == (dims, ("N",))
    result = add_loss_output(linear(last="Softmax", batch=6), "log", weight_name="w", label_column=False)
    assert [shape_of(value.type) for value in result.graph.input] == [(6, COLUMNS), (6,), (6,)]


def test_the_loss_has_no_weights_of_its_own() -> None:
    model = linear(last="Softmax")
    for score in ("elastic", "log"):
        result = add_loss_output(model, score, penalty={"coef": {"l1": 0.1, "l2": 0.2}}, weight_name="w")
        assert result.graph.initializer == model.graph.initializer
        assert list(get_train_initializer(result)) == ["coef", "intercept"]


def test_penalties_of_several_tensors_are_added_after_the_reduction() -> None:
    penalty = {"coef": {"l1": 0.1}, "intercept": {"l1": 0.2, "l2": 0.3}}
    added = 0.1 * np.abs(COEF).sum() + 0.2 * np.abs(INTERCEPT).sum() + 0.3 * (INTERCEPT**2).sum()
    for reduction, base in (("sum", (D**2).sum()), ("mean", (D**2).mean())):
        result = add_loss_output(linear(), penalty=penalty, reduction=reduction)
        assert loss_of(result, x=X, label=T) == pytest.approx(base + added, rel=1e-12)
    result = add_loss_output(linear(), penalty={"coef": {"l1": 0.0, "l2": 0.0}})
    assert loss_of(result, x=X, label=T) == pytest.approx((D**2).sum(), rel=1e-12)


def test_the_penalty_of_a_scalar_and_of_another_type() -> None:
    model = linear()
    scale = numpy_helper.from_array(np.float32(-2), "scale")
    model.graph.initializer.append(scale)
    result = add_loss_output(model, penalty={"scale": {"l1": 0.5, "l2": 0.25}})
    assert loss_of(result, x=X, label=T) == pytest.approx((D**2).sum() + 2, rel=1e-12)


# -- names, and what is left alone -------------------------------------------------------------------------------


def renamed(**new: str) -> ModelProto:
    """The linear model with other names for its values."""
    model = linear()
    for node in model.graph.node:
        for field in (node.input, node.output):
            field[:] = [new.get(name, name) for name in field]
    for value in (*model.graph.input, *model.graph.output, *model.graph.initializer):
        value.name = new.get(value.name, value.name)
    return model


def test_intermediates_give_way_to_the_names_of_the_user() -> None:
    model = renamed(product="label", sum="loss")
    model.graph.value_info.append(helper.make_tensor_value_info("label", TensorProto.DOUBLE, ["N", TARGETS]))
    result = add_loss_output(model)
    assert loss_of(result, x=X, label=T) == pytest.approx((D**2).sum())
    assert names(result.graph.input) == ["x", "label"]
    result = add_loss_output(renamed(product="weight"), weight_name="weight")
    assert loss_of(result, x=X, label=T, weight=WEIGHTS) == pytest.approx((D**2 * WEIGHTS[:, None]).sum())
    result = add_loss_output(renamed(product="const", sum="loss/Sub_out"), "elastic")  # names that the loss would use
    assert loss_of(result, x=X, label=T) == pytest.approx((D**2 + np.abs(D)).sum() / 2)


def test_an_intermediate_that_a_body_reads_gives_way() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
    g (float[n] x, bool c) => (float[n] y) {
        label = Neg (x)
        y = If (c) <then_branch = a () => (p) { p = Abs (label) }, else_branch = b () => (q) { q = Exp (label) }>
    }"""
    result = add_loss_output(parser.parse_model(text))
    x = np.array([1, 2], np.float32)
    assert loss_of(result, x=x, c=np.array(True), label=np.zeros(2, np.float32)) == 5
    with raises(UsageError, "conflict", "label_name", "q"):
        add_loss_output(parser.parse_model(text), label_name="q")


@pytest.mark.parametrize("taken", ["x", "y", "coef"])
@pytest.mark.parametrize("argument", ["loss_name", "label_name", "weight_name"])
def test_what_the_user_named_keeps_its_name(taken: str, argument: str) -> None:
    with raises(UsageError, "conflict", argument, taken):
        add_loss_output(linear(), **{argument: taken})


def test_a_node_may_bear_the_name_of_the_label() -> None:
    model = linear()
    model.graph.node[0].name = "label"
    assert loss_of(add_loss_output(model), x=X, label=T) == pytest.approx((D**2).sum())


def test_an_output_that_is_an_input_and_one_that_is_a_weight() -> None:
    model = linear(outputs=("y",))
    for name, dims in (("x", ["N", COLUMNS]), ("intercept", [TARGETS])):
        model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.DOUBLE, dims))
    result = add_loss_output(model, output_index="intercept")
    assert loss_of(result, x=X, label=T[0]) == pytest.approx(((INTERCEPT - T[0]) ** 2).sum())
    result = add_loss_output(model, output_index="x")
    assert loss_of(result, x=X, label=X + 1) == pytest.approx(X.size)


def test_the_model_is_not_changed() -> None:
    for opset in (7, 18):
        model = linear(opset=opset, last="Softmax")
        before = model.SerializeToString()
        add_loss_output(model, "log", weight_name="w", penalty={"coef": 1.0})
        assert model.SerializeToString() == before


def test_external_weights_stay_where_they_are(tmp_path: Path) -> None:
    coef = RNG.standard_normal((COLUMNS, 600)).astype(np.float32)
    model = linear(coef, np.zeros(600, np.float32))
    file = tmp_path / "model.onnx"
    onnx.save(model, file, save_as_external_data=True, location="weights.bin", size_threshold=100)
    light = onnx.load(file, load_external_data=False)
    result = add_loss_output(light, penalty={"coef": 0.1})
    assert result.graph.initializer == light.graph.initializer
    onnx.save(result, tmp_path / "loss.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "loss.onnx", providers=["CPUExecutionProvider"])
    x, t = X.astype(np.float32), np.zeros((N, 600), np.float32)
    expected = ((x @ coef) ** 2).sum() + 0.1 * (coef**2).sum()
    assert session.run(["loss"], {"x": x, "label": t})[0][0, 0] == pytest.approx(expected, rel=1e-5)
    with raises(UsageError, "missing_value", "coef"):
        get_train_initializer(light)


def test_a_second_loss_on_top() -> None:
    first = add_loss_output(linear(outputs=("y", "product")), output_index="y", loss_name="first")
    both = add_loss_output(first, "l1", output_index="product", label_name="other")
    assert names(both.graph.output) == ["loss", "first", "y", "product"]
    found = run(both, x=X, label=T, other=np.zeros_like(T))
    assert found["first"][0, 0] == pytest.approx((D**2).sum())
    assert found["loss"][0, 0] == pytest.approx(np.abs(X @ COEF).sum())


def test_inputs_and_outputs_are_those_of_the_older_function() -> None:
    if not (GOLDEN / "linreg_loss.input.onnx").exists():
        pytest.skip("the graphs of the older function are not here; ONNXGRAD_GOLDEN names their folder")
    ours, theirs = (
        add_loss_output(onnx.load(GOLDEN / "linreg.input.onnx")),
        onnx.load(GOLDEN / "linreg_loss.input.onnx"),
    )
    assert names(ours.graph.input) == names(theirs.graph.input)
    assert names(ours.graph.output) == names(theirs.graph.output)
    x, t = RNG.standard_normal((7, 10)).astype(np.float32), RNG.standard_normal((7, 1)).astype(np.float32)
    assert loss_of(ours, X=x, label=t) == pytest.approx(loss_of(theirs, X=x, label=t), rel=1e-6)


# -- helpers -----------------------------------------------------------------------------------------------------


def test_train_initializers_are_the_float_ones() -> None:
    model = linear()
    model.graph.initializer.append(numpy_helper.from_array(np.arange(3), "rows"))
    model.graph.initializer.append(numpy_helper.from_array(np.ones(2, np.float16), "half"))
    found = get_train_initializer(model)
    assert list(found) == ["coef", "intercept", "half"]
    values, tensor = found["coef"]
    np.testing.assert_array_equal(values, COEF)
    assert tensor == model.graph.initializer[0]


# -- asked wrongly -----------------------------------------------------------------------------------------------

WRONG = {
    "a misspelt loss": ({"score_name": "squared_eror"}, ("unknown_name", "squared_eror"), "squared_error"),
    "a loss of another kind": ({"score_name": "huber"}, ("unknown_name", "huber"), "losses:"),
    "a misspelt reduction": ({"reduction": "average"}, ("wrong_value", "reduction='average'", "mean", "sum"), "'sum'"),
    "no reduction": ({"reduction": "none"}, ("wrong_value", "reduction='none'", "mean", "sum"), "'sum'"),
    "an empty penalty": ({"penalty": {}}, ("no_data", "penalty"), "l1"),
    "a misspelt weight": ({"penalty": {"coeff": 0.1}}, ("unknown_name", "penalty", "coeff"), "coef?"),
    "a penalty of an input": ({"penalty": {"x": 0.1}}, ("unknown_name", "penalty", "x"), "coef"),
    "a misspelt factor": (
        {"penalty": {"coef": {"L1": 0.1}}}, ("unknown_name", "penalty", "coef", "L1", "0.1", "l1", "l2"), "l1"),
    "no factor": ({"penalty": {"coef": {}}}, ("unknown_name", "penalty", "coef", "l1", "l2"), "l1"),
    "a factor that is not a number": (
        {"penalty": {"coef": {"l1": "a"}}}, ("wrong_value", "penalty", "coef", "a"), "l1"),
    "a factor that is not finite": ({"penalty": {"coef": np.nan}}, ("wrong_value", "penalty", "coef"), "l1"),
    "a misspelt output": ({"output_index": "yy"}, ("unknown_name", "output_index", "yy"), "did you mean y?"),
    "a position beyond": ({"output_index": 1}, ("wrong_value", "output_index=1"), "0 or 'y'"),
    "a negative position": ({"output_index": -1}, ("wrong_value", "output_index=-1"), "0 or 'y'"),
    "a truth value": ({"output_index": False}, ("wrong_value", "output_index=False"), "0 or 'y'"),
    "one name for two": ({"weight_name": "label"}, ("conflict", "label_name", "weight_name", "label"), ""),
    "an empty name": ({"label_name": ""}, ("wrong_value", "label_name=''"), ""),
    "an option of another kind": (
        {"score_name": "elastic", "l1_weight": "a"}, ("wrong_value", "l1_weight", "a"), "weight"
    ),
    "an eps of 0": ({"score_name": "log", "eps": 0}, ("wrong_value", "3.72e-44", "0.5"), ""),
    "an eps of 1/2": ({"score_name": "log", "eps": 0.5}, ("wrong_value", "3.72e-44", "0.5"), ""),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_asked_wrongly(wrong: str) -> None:
    arguments, expected, hint = WRONG[wrong]
    with raises(UsageError, *expected) as caught:
        add_loss_output(linear(), **arguments)
    assert hint in (caught.value.hint or "")


def test_several_outputs_ask_for_a_choice() -> None:
    with raises(UsageError, "ambiguous", "output_index", "2") as caught:
        add_loss_output(linear(outputs=("y", "product")))
    assert "0 or 'y', 1 or 'product'" in caught.value.hint


def test_outputs_that_cannot_be_judged() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17, "custom" : 1]>
    g (float[n, 1] x) => (int64[n] i, float[n, 1] one, seq(float[n, 1]) s, float u, float z) {
        i = ArgMax <axis = 1, keepdims = 0> (x)
        one = Sigmoid (x)
        s = SequenceConstruct (x)
        u = custom.Thing (x)
        z = ReduceSum <keepdims = 0> (x)
    }"""
    model = parser.parse_model(text)
    model.graph.output[3].type.tensor_type.ClearField("shape")
    for name, score, expected in (
        ("i", "l2", ("wrong_type", "i")),
        ("s", "l2", ("wrong_type", "s")),
        ("u", "l2", ("wrong_shape", "u")),
        ("one", "log", ("wrong_shape", "one", "1")),
        ("z", "log", ("wrong_shape", "z")),
    ):
        with raises(UsageError, *expected):
            add_loss_output(model, score, output_index=name)
    with raises(UsageError, "conflict", "weight_name", "z"):
        add_loss_output(model, output_index="z", weight_name="w")
    model.opset_import[0].version = 999
    with raises(OnnxgradError, "refused", "999", "28"):
        add_loss_output(model, output_index="one")
