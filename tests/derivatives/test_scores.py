"""The score of one class in place of all: a fixed one, the best, or that of a label."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import parser

from onnxgrad_cli.derivatives.kinds import derive
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.metadata import read_derived
from onnxgrad_cli.verification.derivative_proof import prove_derived
from tests.derivatives.test_kinds import compare, run
from tests.facts import raises

NET = """<ir_version: 10, opset_import: ["" : 18]>
net (double[N, 3] x, int64[3] i) => (double[N, 4] y, double[N, 4, 2] z, int64[3] j)
<double[3, 4] w = {1, 2, 3, 4, 5, 6, 7, 8, -9, 1, 2, 3}, int64[1] last = {2}, double[2] two = {1, -1}> {
  h = Mul(x, x)
  y = MatMul(h, w)
  u = Unsqueeze(y, last)
  z = Mul(u, two)
  j = Identity(i)
}"""
X = np.array([[1.0, 2, 3], [-1, 0.5, 0.25], [3, 1, -1]])
W = np.array([[1.0, 2, 3, 4], [5, 6, 7, 8], [-9, 1, 2, 3]])
INDEX = {"i": np.arange(3)}


@pytest.mark.parametrize("which", [2, "2", "argmax", "label"])
def test_the_gradient_is_that_of_the_class(which: int | str) -> None:
    model = derive(parser.parse_model(NET), of="y", wrt="x", class_=which, keep_outputs=True)
    label = np.array([3, 0, 1])
    classes = {"argmax": (X * X @ W).argmax(1), "label": label}.get(str(which), np.full(3, 2))
    found = run(model, {"x": X, **INDEX, **({"label": label} if which == "label" else {})})
    np.testing.assert_allclose(found["y_score"], (X * X @ W)[range(3), classes])
    np.testing.assert_allclose(found["x_grad"], 2 * X * W.T[classes])
    said = read_derived(model)
    assert said is not None and prove_derived(model, said, original=parser.parse_model(NET)).verdict == "proved"


@pytest.mark.parametrize("axis", [1, -2])
def test_along_another_axis_the_score_has_the_others(axis: int) -> None:
    original = parser.parse_model(NET)
    model = derive(original, of="z", wrt="x", class_="label", class_axis=axis, cotangents="input")
    g, label = np.array([[1.0, 2], [3, 4], [5, 6]]), np.array([[0, 1], [2, 3], [1, 1]])
    slopes = np.einsum("bk,bki,k->bi", g, W.T[label], [1.0, -1.0])
    compare(run(model, {"x": X, **INDEX, "label": label, "z_score_grad": g}), {"x_grad": 2 * X * slopes}, 1e-12)
    said = read_derived(model)
    assert said is not None and prove_derived(model, said, original=original).verdict == "proved"


@pytest.mark.parametrize("label", [-1, 4])
def test_a_label_that_is_no_class_ends_the_run(label: int) -> None:
    """A negative one would count from the end."""
    model = derive(parser.parse_model(NET), of="y", wrt="x", class_="label")
    with pytest.raises(Exception, match=r"(?i)out of|bound"):
        run(model, {"x": X, **INDEX, "label": np.array([0, label, 1])})


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        ({"class_": 4}, ("wrong_value", "class_", "y", "4", "1", "4")),
        ({"class_": -1}, ("wrong_value", "class_", "-1")),
        ({"class_": "best"}, ("wrong_value", "class_", "best")),
        ({"class_": 1, "class_axis": 2}, ("wrong_shape", "class_axis", "y", "4", "2")),
        ({"class_": 1, "of": "j"}, ("wrong_type", "of", "j", "j", "int64", "3")),
    ],
)
def test_what_is_no_class_is_refused(arguments: dict[str, int | str], facts: tuple[str, ...]) -> None:
    with raises(UsageError, *facts) as raised:
        derive(parser.parse_model(NET), **{"of": "y", **arguments})  # type: ignore[arg-type]
    assert raised.value.hint


def test_labels_of_other_sizes_than_the_scores_prove_nothing() -> None:
    """A runtime takes fewer labels than there are places, and scores the first ones."""
    original = parser.parse_model(NET)
    model = derive(original, of="y", wrt="x", class_="label", cotangents="input")
    said = read_derived(model)
    assert said is not None
    data = {"x": X, **INDEX, "label": np.array([1, 2]), "y_score_grad": np.ones(2)}
    proof = prove_derived(model, said, original=original, data=data)
    assert proof.verdict != "proved" and "[2]" in proof.why and "[3, 4]" in proof.why
