"""Names after CasADi's convention, and its own derivatives of the same function where it is installed."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from onnx import parser

from onnxgrad_cli.common.choices import Derivative
from onnxgrad_cli.derivatives.kinds import KINDS, derive
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.metadata import read_derived
from onnxgrad_cli.verification.derivative_proof import prove_derived
from tests.facts import raises

NET = parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]> net (double[3] x) => (double[2] y)
<double[2, 3] w = {0.5, -0.2, 0.3, 0.1, 0.4, -0.6}> { h = MatMul(w, x) y = Tanh(h) }""")
X = np.array([0.3, -1.0, 2.0])

NAMES: dict[Derivative, tuple[list[str], str]] = {
    "vjp": (["x", "adj_y"], "adj_x"),
    "jvp": (["x", "fwd_x"], "fwd_y"),
    "hvp": (["x", "fwd_x"], "fwd_adj_x"),
    "jacobian": (["x"], "jac_y_x"),
    "hessian": (["x"], "hess_y_x_x"),
}


@pytest.mark.parametrize("kind", NAMES)
def test_names(kind: Derivative) -> None:
    model = derive(NET, kind, wrt="x", names="casadi", keep_outputs=True)
    inputs, output = NAMES[kind]
    assert [value.name for value in model.graph.input] == inputs
    assert [value.name for value in model.graph.output] == [output, "y"]
    said = read_derived(model)
    assert said is not None and prove_derived(model, said, original=NET).verdict == "proved"


def test_weights_are_the_multipliers_of_a_lagrangian() -> None:
    model = derive(NET, "hvp", wrt="x", weighted=True, names="casadi")
    assert [value.name for value in model.graph.input] == ["x", "lam_y", "fwd_x"]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in NAMES])
def test_kinds_without_a_name_are_refused(kind: Derivative) -> None:
    with raises(UsageError, "conflict", "names='casadi'", f"kind='{kind}'"):
        derive(NET, kind, wrt="x", names="casadi")


def test_a_name_that_is_taken_is_not_given_twice() -> None:
    taken = parser.parse_model('<ir_version: 8, opset_import: ["" : 17]> g (double[2] adj_y, double[2] x) => '
                               "(double[2] y) { y = Mul(adj_y, x) }")  # fmt: skip
    model = derive(taken, names="casadi", wrt="x")
    assert [value.name for value in model.graph.input] == ["adj_y", "x", "adj_y_1"]
    with pytest.raises(UsageError, match="names"):
        derive(taken, names="matlab")  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "asked"),
    [("vjp", "adj:x"), ("jvp", "fwd:y"), ("jacobian", "jac:y:x"), ("hessian", "hess:y:x:x")],
)
def test_casadi_says_the_same_by_the_same_names(kind: Derivative, asked: str) -> None:
    """The function is written by hand: CasADi's own import of ONNX runs on a C library that no wheel brings."""
    ca = pytest.importorskip("casadi")
    inputs, output = NAMES[kind]
    x = ca.MX.sym("x", 3)
    y = ca.tanh(ca.DM([[0.5, -0.2, 0.3], [0.1, 0.4, -0.6]]) @ x)
    function = ca.Function("net", [x], [ca.sum1(y) if kind == "hessian" else y], ["x"], ["y"])
    theirs = function.factory("theirs", [name.replace("_", ":") for name in inputs], [asked])
    assert (theirs.name_in(), theirs.name_out()) == (inputs, [output])
    model = derive(NET, kind, wrt="x", names="casadi")
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {"x": X, "adj_y": np.array([2.0, -1.0]), "fwd_x": np.array([1.0, 0.5, -2.0])}
    (ours,) = session.run([output], {name: feeds[name] for name in inputs})
    found = np.array(theirs(*[feeds[name] for name in inputs]))
    np.testing.assert_allclose(ours, found.reshape(ours.shape), rtol=1e-12)
