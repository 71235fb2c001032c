"""`onnxgrad derive`: models of derivatives from the command line, and names that are identifiers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from onnxgrad_cli import derive, scoped, stop_gradient
from onnxgrad_cli.errors import UsageError
from tests.cli_harness import NO_WEIGHTS, UNKNOWN_OPS, Shell, save
from tests.facts import raises

SQUARES = """
<ir_version: 8, opset_import: ["": 17]>
squares (float[batch, 2] x, float[batch, 2] z) => (float[batch, 2] y, float[1, 1] total, int64[batch] best)
<float[2] "layer.scale" = {3, 5}, int64[2] every = {0, 1}>
{
  square = Mul(x, x)
  scaled = Mul(square, "layer.scale")
  y = Add(scaled, z)
  total = ReduceSum(y, every)
  best = ArgMax <axis = 1, keepdims = 0> (y)
}
"""

X = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
SCALE = np.array([3, 5], np.float32)


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    save(SQUARES, tmp_path / "squares.onnx")
    return Shell(tmp_path, capsys)


def run(path: str, **feeds: np.ndarray) -> dict[str, np.ndarray]:
    onnx.checker.check_model(path, full_check=True)
    session = onnxruntime.InferenceSession(path)
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(None, feeds), strict=True))


def test_vjp_is_the_default(shell: Shell) -> None:
    result = shell("derive", "squares.onnx", "--of", "y")
    assert result.code == 0, result.err
    assert "input   y_grad" in result.out and "float[batch, 2]" in result.out
    g = np.arange(6, dtype=np.float32).reshape(3, 2)
    found = run("squares.vjp.onnx", x=X, z=X, y_grad=g)
    assert list(found) == ["x_grad", "z_grad", "layer.scale_grad"]
    np.testing.assert_allclose(found["x_grad"], 2 * X * SCALE * g)
    np.testing.assert_allclose(found["z_grad"], g)
    np.testing.assert_allclose(found["layer.scale_grad"], (X * X * g).sum(0))


def test_both_outputs_and_ones(shell: Shell) -> None:
    assert (
        shell("derive", "squares.onnx", "--option", "keep-outputs", "--option", "fill-grad", "-o", "d.onnx").code == 0
    )
    found = run("d.onnx", x=X, z=X)
    assert list(found) == ["x_grad", "z_grad", "layer.scale_grad", "y", "total", "best"]
    np.testing.assert_allclose(found["x_grad"], 4 * X * SCALE)  # once through y, once through total


def test_what_only_onnxruntime_training_runs_is_not_opened(shell: Shell) -> None:
    yields = ("derive", "squares.onnx", "--of", "y", "--option", "keep-yield-op", "-o", "d.onnx")
    assert shell(*yields).code == 0
    assert "YieldOp" in {node.op_type for node in onnx.load("d.onnx").graph.node}
    assert shell(*yields, "--verify").code == 4, "a proof that is asked for can't be had"


def test_loss(shell: Shell) -> None:
    arguments = ("--option", "loss", "--loss-output", "total", "--label-input", "z", "-o", "d.onnx")
    assert shell("derive", "squares.onnx", *arguments).code == 0
    found = run("d.onnx", x=X, z=X)
    assert list(found) == ["total", "y", "best", "x_grad"]
    np.testing.assert_allclose(found["x_grad"], 2 * X * SCALE)
    assert shell("derive", "squares.onnx", *arguments, "--wrt", "layer*").code == 0
    np.testing.assert_allclose(run("d.onnx", x=X, z=X)["layer.scale_grad"], (X * X).sum(0))


@pytest.mark.parametrize(
    ("kind", "feeds", "expected"),
    [
        ("jvp", {"x_tangent": X + 1}, {"y_tangent": 2 * X * SCALE * (X + 1)}),
        ("hvp", {"x_vector": X + 1}, {"x_hvp": 2 * SCALE * (X + 1)}),
        ("jacobian", {}, {"y_jacobian_x": np.diag((2 * X * SCALE).ravel()).reshape(3, 2, 3, 2)}),
        ("hessian", {}, {"x_hessian_x": np.diag(np.tile(2 * SCALE, 3)).reshape(3, 2, 3, 2)}),
        ("gnvp", {"x_vector": X + 1}, {"x_gnvp": (2 * X * SCALE) ** 2 * (X + 1)}),
        ("hessian-diagonal", {}, {"x_hessian_diagonal": np.tile(2 * SCALE, (3, 1))}),
        ("laplacian", {}, {"x_laplacian": np.float32(6 * SCALE.sum())}),
    ],
)
def test_kinds(shell: Shell, kind: str, feeds: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    result = shell("derive", "squares.onnx", "--kind", kind, "--of", "y", "--wrt", "x")
    assert result.code == 0, result.err
    found = run(f"squares.{kind}.onnx", x=X, z=X, **feeds)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-6)


def test_json(shell: Shell) -> None:
    found = shell(
        "derive", "squares.onnx", "--of", "y", "--wrt", "x", "--json"
    ).json  # other nodes read y, and add to its cotangent
    assert found["output"] == {"x_grad": "float[batch, 2]"} and found["files"] == ["squares.vjp.onnx"]
    assert list(found["input"]) == ["x", "z", "y_grad"]


def test_nothing_is_overwritten(shell: Shell) -> None:
    before = Path("squares.onnx").read_bytes()
    assert shell("derive", "squares.onnx", "-o", "squares.onnx").code == 2
    save(NO_WEIGHTS, Path("other.onnx"))
    assert shell("derive", "squares.onnx", "-o", "other.onnx").code == 2
    assert Path("squares.onnx").read_bytes() == before
    assert shell("derive", "squares.onnx", "-o", "other.onnx", "--force").code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("--kind", "jvp", "--option", "fill-grad", "--option", "keep-outputs"), 2, "only available for the kind vjp"),
        (("--option", "fill-grad"), 2, "FillGrad requires KeepOutputs"),
        (("--option", "keep-yield-op", "--option", "keep-outputs"), 2, "can't be combined"),
        (("--loss-output", "total"), 2, "require --option loss"),
        (("--option", "loss", "--loss-output", "y"), 2, "not one float number"),
        (("--option", "loss", "--loss-output", "best"), 2, "not one float number"),
        (("--of", "best"), 2, "--of: 'best' matches none of the float outputs"),
        (("--wrt", "scale"), 2, "did you mean layer.scale?"),
        (("--wrt", "every"), 2, "matches none of the float inputs"),
    ],
)
def test_refused(shell: Shell, arguments: tuple[str, ...], code: int, text: str) -> None:
    result = shell("derive", "squares.onnx", *arguments)
    assert result.code == code and text in result.err, result.err
    assert shell.files() == ["squares.onnx"] or set(shell.files()) == {"squares.onnx"}


def test_an_operator_without_a_rule_is_named(shell: Shell) -> None:
    save(UNKNOWN_OPS, Path("unknown.onnx"))
    result = shell("derive", "unknown.onnx")
    assert result.code == 3 and "my.ops::Twirl" in result.err and "my.ops::Swirl" in result.err


def test_a_loss_of_unknown_size_is_no_number(shell: Shell) -> None:
    save(
        SQUARES.replace("float[1, 1] total", "float[batch] total")
        .replace("total = ReduceSum(y, every)", "two = ReduceSum<keepdims=0>(y, last)\n  total = Neg(two)")
        .replace("every = {0, 1}", "every = {0, 1}, int64[1] last = {1}"),
        Path("long.onnx"),
    )
    result = shell("derive", "long.onnx", "--option", "loss", "--loss-output", "total")
    assert result.code == 2 and result.facts[1:] == ("total",) and "float[batch]" in result.err


def test_second_derivatives_with_stopped_edges_are_refused() -> None:
    model = onnx.parser.parse_model(SQUARES)
    with scoped():
        stop_gradient("Mul", [1])
        with raises(UsageError, "conflict", "x"):
            derive(model, "hessian", of="y", wrt="x")
        assert derive(model, of="y", wrt="x").graph.output[0].name == "x_grad"


def test_a_score_by_an_inner_value_of_each_sample_by_casadis_name(shell: Shell) -> None:
    arguments = "--kind jacobian --of y --class argmax --wrt scaled --per-sample --names casadi --verify".split()
    result = shell("derive", "squares.onnx", *arguments, "-o", "d.onnx")
    assert result.code == 0, result.err
    assert all(word in result.out for word in ("jacobian of ", "predicted class", " y ", "scaled"))
    best = (X * X * SCALE + X).argmax(1)
    np.testing.assert_allclose(run("d.onnx", x=X, z=X)["jac_y_score_scaled"], np.eye(2)[best])
    assert shell("check", "d.onnx", "--original", "squares.onnx").code == 0
    refused = shell("derive", "squares.onnx", "--of", "total", "--per-sample")
    assert refused.code == 3 and "ReduceSum" in refused.err
    assert shell("derive", "squares.onnx", "--option", "loss", "--loss-output", "total", "--per-sample").code == 2


def test_a_class_is_found_by_its_name_among_the_names_of_several_outputs(shell: Shell) -> None:
    model = onnx.load("squares.onnx")
    names = {"total": ["ant", "bee"], "y": ["cat", "dog"]}
    model.metadata_props.add(key="onnxgrad.classes", value=json.dumps(names))
    onnx.save(model, "named.onnx")
    command = ("derive", "named.onnx", "--of", "y", "--wrt", "x", "--no-verify", "-o", "d.onnx", "--force", "--class")
    for class_, column in (("dog", 1), ("ant", 0)):
        assert shell(*command, class_).code == 0
        found = run("d.onnx", x=X, z=X)["x_grad"]
        np.testing.assert_array_equal(found, 2 * X * SCALE * np.eye(2, dtype=np.float32)[column])
    assert shell(*command, "bird").code == 2


def test_a_class_is_named_by_its_output(shell: Shell) -> None:
    text = """<ir_version: 8, opset_import: ["": 17]>
    g (float[n, 3] x) => (float[n, 3] y, float[n, 3] z) { y = Tanh(x) z = Sin(x) }"""
    derived = {}
    for name, other in (("same", ["c", "cat", "dog"]), ("other", ["cat", "d", "e"])):
        model = onnx.parser.parse_model(text)
        model.metadata_props.add(key="onnxgrad.classes", value=json.dumps({"y": ["a", "cat", "b"], "z": other}))
        onnx.save(model, f"{name}.onnx")
        derived[name] = shell("derive", f"{name}.onnx", "--of", "z", "--class", "cat", "--no-verify", "-o", "d.onnx")
    assert derived["same"].code == 0, derived["same"].err
    assert derived["other"].code == 2 and derived["other"].facts == ("ambiguous", "cat")
    assert (
        shell("derive", "other.onnx", "--of", "z", "--class", "d", "--no-verify", "-o", "d.onnx", "--force").code == 0
    )
