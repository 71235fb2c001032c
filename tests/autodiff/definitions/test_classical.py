"""Operators of ai.onnx.ml: the values are those of onnxruntime's kernels, the gradients those of PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import ModelProto, helper, numpy_helper
from torch import Tensor

from onnxgrad_cli.builder import build
from onnxgrad_cli.errors import UnsupportedError
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.jobs.build import run_build
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.options import Options
from tests.facts import raises, raises_as

ML = "ai.onnx.ml"
RNG = np.random.default_rng(0)
X = RNG.normal(size=(5, 4)).astype(np.float32)
A = RNG.normal(size=(3, 4)).astype(np.float32)
B = RNG.normal(size=3).astype(np.float32)
VECTORS = RNG.normal(size=(6, 4)).astype(np.float32)
ALPHA = RNG.normal(size=6).astype(np.float32)


def model_of(op_type: str, outputs: Sequence[str] = ("y",), before: bool = False, **attributes: Any) -> ModelProto:
    """One node; with `before` the input goes through a weight W first."""
    nodes = [helper.make_node(op_type, ["z" if before else "x"], list(outputs), name="ml", domain=ML, **attributes)]
    if before:
        nodes.insert(0, helper.make_node("MatMul", ["x", "W"], ["z"]))
    weights = [numpy_helper.from_array(W, "W")] if before else []
    x = helper.make_tensor_value_info("x", 1, ["n", 4])
    results = [onnx.ValueInfoProto(name=name) for name in outputs]
    imports = [helper.make_opsetid("", 18), helper.make_opsetid(ML, 3)]
    return helper.make_model(helper.make_graph(nodes, "g", [x], results, weights), opset_imports=imports, ir_version=9)


W = RNG.normal(size=(4, 4)).astype(np.float32)
SOFTMAX = {"post_transform": "SOFTMAX"}
LOGISTIC = {"post_transform": "LOGISTIC"}
SVM = {"coefficients": ALPHA, "rho": [0.25], "n_supports": 6, "support_vectors": VECTORS.ravel()}
KERNEL_PARAMETERS = {"kernel_params": [0.3, 0.7, 3.0]}


def regression(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return x @ a + b


def pair(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    s = x @ a + b
    return torch.cat([1 - s, s], 1)


def votes(x: Tensor, s: Tensor, a: Tensor, r: Tensor, counts: Sequence[int] = (2, 3, 1)) -> Tensor:
    """The score of each pair of classes, whose support vectors lie one class behind the other."""
    ends = np.cumsum(counts)
    k = torch.exp(-0.3 * ((x[:, None] - s) ** 2).sum(2))
    of = [k[:, end - count : end] for end, count in zip(ends, counts, strict=True)]
    w = [a[:, end - count : end] for end, count in zip(ends, counts, strict=True)]
    pairs = [(i, j) for i in range(len(counts)) for j in range(i + 1, len(counts))]
    return torch.stack([of[i] @ w[i][j - 1] + of[j] @ w[j][i] for i, j in pairs], 1) + r


def both(s: Tensor) -> Tensor:
    return torch.cat([-s, s], 1)


Case = tuple[str, Sequence[str], dict[str, Any], Callable[..., Tensor], Sequence[np.ndarray]]
COLUMN = ALPHA.reshape(6, 1)
RHO = np.float32([0.25])
CLASSES = {"coefficients": A.ravel(), "intercepts": B, "classlabels_ints": [4, 7, 9]}
TWO = {"coefficients": A[0], "intercepts": B[:1], "classlabels_ints": [5, 9]}
THREE = {"coefficients": A.ravel(), "intercepts": B, "targets": 3}
MACHINE = {**KERNEL_PARAMETERS, "kernel_type": "RBF", "support_vectors": VECTORS.ravel()}
TWO_ROWS = RNG.normal(size=(2, 6)).astype(np.float32)
HALVES = {"coefficients": ALPHA, "rho": RHO, "classlabels_strings": ["no", "yes"], "vectors_per_class": [4, 2]}
CASES: dict[str, Case] = {
    "regression": ("LinearRegressor", "y", THREE, regression, [A.T, B]),
    "regression without intercepts": ("LinearRegressor", "y", {"coefficients": A[0]}, lambda x, a: x @ a, [A[:1].T]),
    "logistic regression": (
        "LinearRegressor", "y", {"coefficients": A.ravel(), "intercepts": B, "targets": 3, **LOGISTIC},
        lambda *v: torch.sigmoid(regression(*v)), [A.T, B],
    ),
    "three classes": ("LinearClassifier", "ly", CLASSES, regression, [A.T, B]),
    "softmax": ("LinearClassifier", "ly", CLASSES | SOFTMAX, lambda *v: torch.softmax(regression(*v), 1), [A.T, B]),
    "one against the rest": (
        "LinearClassifier", "ly", CLASSES | LOGISTIC, lambda *v: torch.sigmoid(regression(*v)), [A.T, B],
    ),
    "names": (
        "LinearClassifier", "ly", {**CLASSES, "classlabels_ints": None, "classlabels_strings": ["a", "b", "c"]},
        regression, [A.T, B],
    ),
    "two classes, one row": ("LinearClassifier", "ly", TWO, pair, [A[:1].T, B[:1]]),
    "two classes, one row, logistic": (
        "LinearClassifier", "ly", TWO | LOGISTIC,
        lambda *v: torch.sigmoid(torch.cat([-regression(*v), regression(*v)], 1)), [A[:1].T, B[:1]],
    ),
    "two classes, one row, softmax": ("LinearClassifier", "ly", TWO | SOFTMAX, pair, [A[:1].T, B[:1]]),
    "linear kernel": (
        "SVMRegressor", "y", {**SVM, **KERNEL_PARAMETERS, "kernel_type": "LINEAR"},
        lambda x, s, a, r: x @ s.T @ a + r, [VECTORS, COLUMN, RHO],
    ),
    "polynomial kernel": (
        "SVMRegressor", "y", {**SVM, **KERNEL_PARAMETERS, "kernel_type": "POLY"},
        lambda x, s, a, r: (0.3 * x @ s.T + 0.7) ** 3 @ a + r, [VECTORS, COLUMN, RHO],
    ),
    "radial kernel": (
        "SVMRegressor", "y", {**SVM, **KERNEL_PARAMETERS, "kernel_type": "RBF"},
        lambda x, s, a, r: torch.exp(-0.3 * ((x[:, None] - s) ** 2).sum(2)) @ a + r, [VECTORS, COLUMN, RHO],
    ),
    "sigmoid kernel": (
        "SVMRegressor", "y", {**SVM, **KERNEL_PARAMETERS, "kernel_type": "SIGMOID"},
        lambda x, s, a, r: torch.tanh(0.3 * x @ s.T + 0.7) @ a + r, [VECTORS, COLUMN, RHO],
    ),
    "no support vectors": (
        "SVMRegressor", "y", {"coefficients": ALPHA[:4], "rho": [0.25], **KERNEL_PARAMETERS, "kernel_type": "LINEAR"},
        lambda x, a, r: x @ a + r, [COLUMN[:4], RHO],
    ),
    "three classes by pairs": (
        "SVMClassifier", "ly", {**MACHINE, "coefficients": TWO_ROWS.ravel(), "rho": B, "classlabels_ints": [4, 7, 9],
                                "vectors_per_class": [2, 3, 1]}, votes, [VECTORS, TWO_ROWS, B],
    ),
    "two classes by support vectors": (
        "SVMClassifier", "ly", {**MACHINE, **HALVES}, lambda *v: both(votes(*v, counts=(4, 2))),
        [VECTORS, COLUMN.T, RHO],
    ),
    "scaler": (
        "Scaler", "y", {"offset": A[0], "scale": A[1]}, lambda x: (x - torch.tensor(A[0])) * torch.tensor(A[1]), [],
    ),
    "scaler of all": ("Scaler", "y", {"offset": [0.5], "scale": [2.0]}, lambda x: (x - 0.5) * 2, []),
    "largest": ("Normalizer", "y", {"norm": "MAX"}, lambda x: x / x.amax(1, keepdim=True), []),
    "magnitudes": ("Normalizer", "y", {"norm": "L1"}, lambda x: x / x.abs().sum(1, keepdim=True), []),
    "length": ("Normalizer", "y", {"norm": "L2"}, lambda x: x / x.norm(dim=1, keepdim=True), []),
}  # fmt: skip


def described(name: str, before: bool) -> ModelProto:
    op_type, outputs, attributes, _, _ = CASES[name]
    given = {key: value for key, value in attributes.items() if value is not None}
    return model_of(op_type, list(outputs), before, **given)


def models() -> Iterator[ModelProto]:
    """The cases, each with a gradient of its input."""
    return (described(name, before=False) for name in CASES)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.thinned(3)
def test_values_are_the_kernels_and_gradients_pytorchs(name: str, tmp_path: Path) -> None:
    *_, reference, weights = CASES[name]
    model = described(name, before=True)
    expected = Executor(model, fallback=False)({"x": X})
    report = run_build(model, tmp_path / "t.onnx", Options(losses=(LossSpec("mse", output="y"),), label="t",
                                                           keep_outputs=True), verify=True)  # fmt: skip
    assert report.status == "built"
    trained = onnx.load(tmp_path / "t.onnx")
    target = np.asarray(expected["y"]) + RNG.normal(size=expected["y"].shape).astype(np.float32)
    found = Executor(trained, fallback=False)({"x": X, "t": target})
    for output in model.graph.output:
        same = np.testing.assert_array_equal if output.name == "l" else np.testing.assert_allclose
        same(found[output.name], expected[output.name], **({} if output.name == "l" else {"rtol": 1e-5, "atol": 1e-6}))
    values = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (W, *weights)]
    x = torch.tensor(X, dtype=torch.float64) @ values[0]
    torch.nn.functional.mse_loss(reference(x, *values[1:]), torch.tensor(target, dtype=torch.float64)).backward()
    gradients = [each for output, each in found.items() if output.endswith("_grad")]
    assert len(gradients) == len(values)
    for value in values:
        close = [g for g in gradients if g.shape == tuple(value.shape) and np.allclose(g, value.grad, 1e-4, 1e-5)]
        assert len(close) == 1, (value.grad, gradients)


def test_what_is_read_straight_from_the_input_is_trained_too() -> None:
    training = build(described("three classes", before=False), Options()).training
    assert training.trained == ["ml/coefficients", "ml/intercepts"]


def test_rows_of_zeros_stay() -> None:
    x = np.concatenate([X, np.zeros((1, 4), np.float32)])
    for norm in ("MAX", "L1", "L2"):
        model = model_of("Normalizer", norm=norm)
        built = build(model, Options(grad_of_input=("x",), keep_outputs=True, label="t")).model
        found = Executor(built, fallback=False)({"x": x, "t": np.zeros_like(x)})
        np.testing.assert_allclose(found["y"], Executor(model, fallback=False)({"x": x})["y"], rtol=1e-6)
        assert np.isfinite(found["x_grad"]).all()


def test_imputer() -> None:
    """What is put in has no gradient, what is not missing has that of itself."""
    x = X.copy()
    x[0, 1] = x[2, 3] = np.nan
    model = model_of("Imputer", imputed_value_floats=[1.0, 2.0, 3.0, 4.0], replaced_value_float=float("nan"))
    built = build(model, Options(grad_of_input=("x",), keep_outputs=True, label="t")).model
    found = Executor(built, fallback=False)({"x": x, "t": np.zeros_like(x)})
    np.testing.assert_array_equal(found["y"], Executor(model, fallback=False)({"x": x})["y"])
    np.testing.assert_allclose(found["x_grad"], np.where(np.isnan(x), 0, 2 * x / x.size), rtol=1e-6)


def test_columns_are_taken_and_put_side_by_side() -> None:
    nodes = [
        helper.make_node("ArrayFeatureExtractor", ["x", "two"], ["a"], domain=ML),
        helper.make_node("ArrayFeatureExtractor", ["x", "one"], ["b"], domain=ML),
        helper.make_node("FeatureVectorizer", ["a", "b"], ["y"], domain=ML, inputdimensions=[2, 1]),
    ]
    model = model_of("Scaler")
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    for name, places in {"two": [3, 0], "one": [1]}.items():
        model.graph.initializer.append(numpy_helper.from_array(np.int64(places), name))
    built = build(model, Options(grad_of_input=("x",), keep_outputs=True, label="t")).model
    found = Executor(built, fallback=False)({"x": X, "t": np.zeros((5, 3), np.float32)})
    np.testing.assert_array_equal(found["y"], Executor(model, fallback=False)({"x": X})["y"])
    np.testing.assert_allclose(found["x_grad"], 2 * X / 15 * np.float32([1, 1, 0, 1]), rtol=1e-6)


@pytest.mark.parametrize(
    ("columns", "named", "why"),
    [
        ("n, many", [4], "only at run time"),
        ("n, 4", [3], ("refused", "FeatureVectorizer_y", "ai.onnx.ml::FeatureVectorizer", "4", "3")),
        ("n", [1], "is not a matrix"),
    ],
)
def test_columns_that_are_not_those_named(columns: str, named: list[int], why: tuple[str, ...] | str) -> None:
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17, "ai.onnx.ml": 1]>
        m (float[{columns}] x) => (float[n, many] y) <float[1] w = {{2}}>
        {{
          h = Mul(x, w)
          y = ai.onnx.ml.FeatureVectorizer<inputdimensions = {named}>(h)
        }}"""
    )
    with raises_as(UnsupportedError, why):
        build(model, Options(label="t"))


def test_of_a_map_of_probabilities_the_tensor_is_judged() -> None:
    model = described("softmax", before=False)
    model.graph.node.append(helper.make_node("ZipMap", ["y"], ["map"], domain=ML, classlabels_int64s=[4, 7, 9]))
    del model.graph.output[1]
    model.graph.output.append(onnx.ValueInfoProto(name="map"))
    training = build(model, Options()).training
    assert training.predictions == ["y"]
    assert len(training.trained) == 2


@pytest.mark.parametrize(
    ("op_type", "attributes", "why"),
    [
        ("LinearRegressor", {"coefficients": A.ravel(), "targets": 3, "post_transform": "PROBIT"},
         ("post_transform", "PROBIT")),
        ("LinearRegressor", {"coefficients": A[0], **LOGISTIC}, ("post_transform", "LOGISTIC")),
        ("LinearRegressor", {"coefficients": A[0], "targets": 3}, ("4", "0", "3")),
        ("LinearClassifier", {**CLASSES, "coefficients": A.ravel()[:11]}, ("11", "3", "3")),
        ("LinearClassifier", {**CLASSES, "intercepts": B[:2]}, ("3", "2")),
        ("LinearClassifier", {**CLASSES, "coefficients": A[:, :3].ravel()}, ("4", "3")),
        ("SVMRegressor", {**SVM, "one_class": 1}, "only the sign"),
        ("SVMRegressor", {**SVM, "coefficients": ALPHA[:5]}, ("5", "6")),
        ("SVMRegressor", {**SVM, "support_vectors": VECTORS[:, :3].ravel()}, ("4", "3")),
        ("SVMClassifier", {**MACHINE, **HALVES, "rho": B}, ("6", "3", "6", "1")),
        ("SVMRegressor", {**SVM, "post_transform": "LOGISTIC"}, ("post_transform", "LOGISTIC")),
        ("SVMClassifier", {**MACHINE, **HALVES, **LOGISTIC}, ("post_transform", "LOGISTIC")),
        ("SVMClassifier", {**MACHINE, **HALVES, "prob_a": [-1.5], "prob_b": [0.25]}, "its probabilities"),
        ("Scaler", {"scale": [1.0]}, "no offset"),
        ("Normalizer", {"norm": "L3"}, ("L3",)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("before", [True, False])
def test_refusals(op_type: str, attributes: dict[str, Any], why: tuple[str, ...] | str, before: bool) -> None:
    """Whether there is another weight or not: the node's own are attributes, and no tensors before it is understood."""
    named = ("refused", "ml", f"ai.onnx.ml::{op_type}")
    with raises_as(UnsupportedError, why if isinstance(why, str) else (*named, *why)):
        outputs = ("l", "y") if op_type.endswith("Classifier") else ("y",)
        build(model_of(op_type, outputs, before, **attributes), Options(losses=(LossSpec("mse", output="y"),)))


def test_trees_are_refused_by_name_where_nothing_else_is() -> None:
    model = model_of("TreeEnsembleRegressor", n_targets=1, nodes_falsenodeids=[0])
    with raises(UnsupportedError, "refused", "ml", "ai.onnx.ml::TreeEnsembleRegressor"):
        build(model, Options())


def test_a_binarizer_is_a_step() -> None:
    """It passes no gradient, at its threshold neither: as PyTorch's comparisons do."""
    text = """
    <ir_version: 10, opset_import: ["": 18, "ai.onnx.ml": 3]> g (float[n, 4] x) => (float[n, 4] y)
    { b = ai.onnx.ml.Binarizer <threshold = 0.5> (x) y = Mul(b, x) }
    """
    x = np.array([[0.5, 0.2, 0.7, -1]], np.float32)
    model = build(onnx.parser.parse_model(text), Options(grad_of_input=("x",))).model
    expected = torch.tensor(x, requires_grad=True)
    ((expected > 0.5).float() * expected).square().mean().backward()
    assert expected.grad is not None
    got = Executor(model)({"x": x, "label": np.zeros_like(x)})["x_grad"]
    np.testing.assert_allclose(got, expected.grad.numpy(), rtol=1e-6)
