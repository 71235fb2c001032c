"""`python -m tools.verify_op`: the gradient of an operator, by mathematics and by PyTorch; wrong ones are found."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

from onnxgrad_cli.autodiff import registry
from onnxgrad_cli.errors import UnsupportedError, UsageError
from onnxgrad_cli.verification.coverage import Coverage, coverage
from tests.cli_harness import Result
from tools.verify_op.__main__ import verify_op
from tools.verify_op.examples import published_cases, published_examples
from tools.verify_op.jacobian import jacobian, rounded
from tools.verify_op.torch_twins import EXPRESSIONS, SAME, expression_of
from tools.verify_op.verification import Request, Verification, run_verify_op

SQUARE = ("--input", "2,2", "--input", "=4,")
"""The example of the standard's guide: a square of four numbers becomes a row."""

OPERATORS = {
    "Mul": "A B C",
    "MatMul": "A B Y",
    "Conv": "X W Y",
    "Softmax": "input output",
    "ReduceMean": "data reduced",
    "Gather": "data output",
    "Where": "X Y output",
    "LayerNormalization": "X Scale B Y",
    "LSTM": "X W R",
    "MaxPool": "X Y",
    "GridSample": "X grid Y",
}
"""Operators of all kinds, and what is differentiable of them by mathematics."""


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(verify_op, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return Result(result.exit_code, result.stdout, result.stderr)


def verified(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.code == 0, result.err
    data: dict[str, Any] = json.loads(result.out)
    return data


def found(data: dict[str, Any]) -> dict[str, str]:
    return {row["operand"]: row["found"] for row in data["operands"]}


# -- the worked example -------------------------------------------------------------------------------------


def test_reshape_by_mathematics() -> None:
    data = verified("Reshape", *SQUARE)
    assert data["passed"] and len(data["examples"]) == 2
    assert found(data) == {"data": "differentiable", "shape": "no float", "reshaped": "differentiable"}
    for example in data["examples"]:
        (gradient,) = example["gradients"]
        assert gradient["jacobian"] == np.eye(4).tolist(), "entry i of the row is entry i of the square"
        expected = np.reshape(example["cotangents"]["reshaped"], (2, 2)).tolist()
        assert gradient["ours"] == gradient["other"] == expected
    points = [example["inputs"]["data"] for example in data["examples"]]
    assert points[0] != points[1]


def test_reshape_by_pytorch() -> None:
    data = verified("Reshape", *SQUARE, "--against", "torch")
    assert found(data) == {"data": "differentiable", "shape": "no float", "reshaped": "differentiable"}
    for example in data["examples"]:
        assert example["mapping"]["expression"] == "torch.reshape(data, shape.tolist())"
        (gradient,) = example["gradients"]
        assert gradient["jacobian"] is None
        assert gradient["ours"] == gradient["other"] == np.reshape(example["cotangents"]["reshaped"], (2, 2)).tolist()


def test_the_page() -> None:
    math, torch = run("Reshape", *SQUARE), run("Reshape", *SQUARE, "--against", "torch")
    assert math.code == torch.code == 0
    for line in ("  reshaped = Reshape (data, shape)", "    [[1. 0. 0. 0.]", "shape     non-differentiable   no float"):
        assert line in math.out.splitlines()
    assert "agrees with the Jacobian times the cotangent" in math.out
    assert "  in PyTorch: torch.reshape(data, shape.tolist())" in torch.out.splitlines()
    assert "PyTorch's data.grad [2, 2]" in torch.out and "[[1. 0." not in torch.out


def test_published_reshape_examples() -> None:
    for against in ("math", "torch"):
        data = verified("Reshape", "--against", against)
        assert data["published"] == 10 - 1, "one of the ten has no elements"
        names = {example["name"] for example in data["examples"]}
        published = {case.name for case in published_cases("reshape")}
        assert len(names) == 2 and names <= published


def test_the_backward_nodes() -> None:
    assert "backward:" not in run("Reshape", *SQUARE).out
    result = run("Reshape", *SQUARE, "--backward")
    assert "data_grad = Reshape (reshaped_grad, " in result.out.split("backward:")[1]


# -- operators of all kinds ---------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.thinned(4)
def test_by_mathematics(op: str) -> None:
    data = verified(op)
    assert data["passed"]
    states = found(data)
    assert all(states[operand] == "differentiable" for operand in OPERATORS[op].split()), states
    for example in data["examples"]:
        assert example["tolerance"] == 1e-6, "in float64"
        for gradient in example["gradients"]:
            cotangent = np.concatenate([np.ravel(c) for c in example["cotangents"].values()])
            product = np.reshape(gradient["jacobian"], (-1, cotangent.size)) @ cotangent
            np.testing.assert_allclose(np.ravel(gradient["ours"]), product, atol=1e-6 * (1 + np.max(np.abs(product))))


@pytest.mark.parametrize("op", [op for op in OPERATORS if op != "LSTM"])
@pytest.mark.thinned(4)
def test_by_pytorch(op: str) -> None:
    data = verified(op, "--against", "torch")
    assert data["passed"] and all(g["difference"] < 1e-6 for e in data["examples"] for g in e["gradients"])


def test_broadcasting_by_hand() -> None:
    for example in verified("Mul", "--input", "2,3", "--input", "3")["examples"]:
        a, b, g = (np.array(x) for x in (*example["inputs"].values(), example["cotangents"]["C"]))
        ours = {gradient["input"]: np.array(gradient["ours"]) for gradient in example["gradients"]}
        np.testing.assert_allclose(ours["A"], g * b, rtol=1e-12)
        np.testing.assert_allclose(ours["B"], np.sum(g * a, 0), rtol=1e-12)


def test_softmax_by_hand() -> None:
    for example in verified("Softmax", "--input", "4")["examples"]:
        y = np.array(example["outputs"]["output"])
        measured = np.array(example["gradients"][0]["jacobian"])
        np.testing.assert_allclose(measured, np.diag(y) - np.outer(y, y), atol=1e-8)


def test_attributes_and_absent_inputs() -> None:
    data = verified("Gemm", "--input", "2,3", "--input", "4,3", "--input", "-", "--attribute", "transB=1",
                    "--attribute", "alpha=2")  # fmt: skip
    for example in data["examples"]:
        a, b, g = (np.array(x) for x in (*example["inputs"].values(), example["cotangents"]["Y"]))
        ours = {gradient["input"]: gradient["ours"] for gradient in example["gradients"]}
        np.testing.assert_allclose(ours["A"], 2 * g @ b, rtol=1e-12)
        np.testing.assert_allclose(ours["B"], 2 * g.T @ a, rtol=1e-12)
    clip = verified("Clip", "--input", "2,3", "--input", "-", "--input", "=0.5")
    assert found(clip)["min"] == "not in these examples" and found(clip)["input"] == "differentiable"
    assert clip["examples"][0]["inputs"]["max"] == 0.5


def test_one_case_is_taken_at_two_points() -> None:
    data = verified("Reshape", "--case", "3")
    assert [example["case"] for example in data["examples"]] == [3, 3]
    assert data["examples"][0]["inputs"] != data["examples"][1]["inputs"]
    assert [example["case"] for example in verified("Where")["examples"]] == [1, 1], "there is one"


def test_the_seed_decides() -> None:
    def outputs(*seed: object) -> Any:
        return [example["outputs"] for example in verified("Tanh", "--input", "3", *seed)["examples"]]

    assert outputs("--seed", 1) == outputs("--seed", 1) != outputs()


def test_an_operand_that_is_refused_is_told() -> None:
    data = verified("Resize")
    states = found(data)
    assert states["X"] == "differentiable" and states["scales"] == "refused"
    result = run("Resize")
    assert "  dL/dscales is refused: the sampled positions depend on it" in result.out


def test_no_derivative_is_measured_at_kinks_and_steps() -> None:
    (first, _) = verified("Relu", "--case", "1")["examples"]
    assert first["gradients"][0]["kinks"] == []
    ends = [example["gradients"][0] for example in verified("Sign")["examples"]]
    zero = [example["inputs"]["x"].index(0) for example in verified("Sign")["examples"]]
    assert [end["kinks"] for end in ends] == [[position] for position in zero]
    assert found(verified("Sign"))["input"] == "derivative 0 in these examples"


def test_float32_where_nothing_computes_in_float64() -> None:
    for example in verified("MeanVarianceNormalization")["examples"]:
        assert example["executor"] == "onnxruntime in float32" and example["tolerance"] == 1e-2


def test_an_operator_of_another_domain() -> None:
    data = verified("BiasGelu", "--input", "2,3", "--input", "3")
    assert data["domain"] == "com.microsoft" and found(data) == {"x": "differentiable", "bias": "differentiable"}


# -- what is wrong is found ---------------------------------------------------------------------------------


@pytest.mark.parametrize("against", ["math", "torch"])
def test_a_wrong_rule_is_found(against: str) -> None:
    with registry.scoped():

        @registry.rule("Sigmoid", override=True)
        def sigmoid(op: Any, g: Any, y: Any, x: Any) -> Any:
            return g * y

        result = run("Sigmoid", "--against", against)
        data = run("Sigmoid", "--against", against, "--json")
    assert result.code == data.code == 4
    assert "Sigmoid: our gradient DIFFERS from" in result.out
    assert json.loads(data.out)["passed"] is False
    assert run("Sigmoid", "--against", against).code == 0


def test_a_gradient_that_is_taken_for_zero_is_found() -> None:
    with registry.scoped():

        @registry.rule("Mul", override=True)
        def mul(op: Any, g: Any, y: Any, a: Any, b: Any) -> Any:
            return g * b, None

        result = run("Mul", "--json")
    assert result.code == 4
    for example in json.loads(result.out)["examples"]:
        a, b = example["gradients"]
        assert a["difference"] < 1e-6 and b["difference"] > 0.5 and not np.any(b["ours"])


def test_a_wrong_sign_in_one_entry_is_found() -> None:
    with registry.scoped():

        @registry.rule("Identity", override=True)
        def identity(op: Any, g: Any, y: Any, x: Any) -> Any:
            return g * op.const(np.array([1.0, 1.0, 0.99]), x)

        assert run("Identity", "--input", "2,3").code == 4


# -- errors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "message", "hint"),
    [
        (["Reshap"], 2, "there is no operator 'Reshap'", "did you mean Reshape"),
        (["And"], 3, "And takes or gives no floating-point value", ""),
        (["ArgMax"], 3, "ArgMax takes or gives no floating-point value", ""),
        (["GlobalLpPool"], 2, "no example of GlobalLpPool with a float input and a float output", "--input"),
        (["Mish"], 2, "too large for a Jacobian", "--input"),
        (["LSTM", "--against", "torch"], 3, "LSTM has no mapping to one function of PyTorch", "--against math"),
        (["Where", "--case", "9"], 2, "no example 9", "1: test_where_example"),
        (["Where", "--case", "1", "--input", "2"], 2, "--case can't be combined with --input", ""),
        (["Gemm", "--input", "2,3", "--input", "3,2", "--attribute", "tranB=1"], 2, "'tranB'", "did you mean transB"),
        (
            ["Gemm", "--input", "2,3", "--input", "3,2", "--attribute", "transB=x"],
            2,
            "'x' is not a valid value for transB",
            "",
        ),
        (["Gemm", "--input", "2,3", "--input", "4,3"], 2, "Gemm does not take these inputs and attributes: ", ""),
        (["Gemm", "--input", "2,3"], 2, "Gemm does not take 1 inputs", "A, B, C"),
        (["Softmax", "--attribute", "axis=1"], 2, "--attribute", "--input"),
        (["Relu", "--input", "two"], 2, "'two' is not a shape", ""),
        (["Relu", "--input", "9" * 5000], 2, "is not a shape", ""),
        (["Relu", "--input", "=two"], 2, "must be numbers", ""),
        (
            ["Einsum", "--input", "2,2", "--attribute", "equation=ii-"],
            2,
            "has the equation 'ii-', which is not valid",
            "",
        ),
        (["Relu", "--input", "=2.5"], 2, "all inputs are constants", "as 2,3"),
        (["Softmax", "--input", "2,2", "--attribute", "axis=1e400"], 2, "'inf' is not a valid value for axis", ""),
    ],
)
def test_errors(arguments: list[str], code: int, message: str, hint: str) -> None:
    result = run(*arguments)
    assert (result.code, result.out) == (code, "")
    assert message in result.err and hint in result.err and "Traceback" not in result.err


def test_a_refused_operator_says_why() -> None:
    result = run("BitCast", "--input", "3", "--attribute", "to=1")
    assert (result.code, result.out) == (3, "") and "the bits of a number have no derivative" in result.err


def test_without_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    result = run("Reshape", "--against", "torch")
    assert result.code == 2
    assert "PyTorch is not installed" in result.err and "pip install 'torch>=2.13', or use --against math" in result.err
    assert run("Reshape").code == 0


# -- its parts ----------------------------------------------------------------------------------------------


def test_jacobian_knows_kinks_steps_and_curves() -> None:
    x = np.array([-1.5, 0.0, 1.0])
    assert jacobian(np.abs, x).kinks.tolist() == [False, True, False]
    assert jacobian(np.sign, x).kinks.tolist() == [False, True, False]
    assert jacobian(np.floor, x).kinks.tolist() == [False, True, True]
    curved = jacobian(lambda x: np.exp(3 * x), x)
    assert not curved.kinks.any()
    np.testing.assert_allclose(np.diag(curved.entries), 3 * np.exp(3 * x), rtol=1e-8)
    changing = jacobian(lambda x: np.arange(np.floor(x[0])), np.array([3.0, 1.0]))
    assert changing.kinks.tolist() == [True, False]


def test_rounding_is_seen() -> None:
    point = {"x": np.linspace(0.5, 2.0, 7)}
    assert not rounded(lambda p: {"y": np.exp(p["x"])}, point, ["x"], 1e-6)
    assert rounded(lambda p: {"y": np.exp(p["x"]).astype(np.float32)}, point, ["x"], 1e-6)


def test_published_cases_do_not_depend_on_what_was_imported_before() -> None:
    from onnx.backend.test.case import node

    before = len(node._NodeTestCases)
    published_cases.cache_clear()
    first = [case.name for case in published_cases("where")]
    published_cases.cache_clear()
    assert (
        [case.name for case in published_cases("where")] == first == ["test_where_example", "test_where_long_example"]
    )
    assert len(node._NodeTestCases) == before


def test_examples_hold_the_published_numbers() -> None:
    (example,) = published_examples("Where")
    (case, _) = published_cases("where")
    inputs, outputs = case.data_sets[0]
    values = example.values
    for value, array in zip(case.model.graph.input, inputs, strict=True):
        np.testing.assert_array_equal(values[value.name], array)
    np.testing.assert_array_equal(example.expected["z"], outputs[0])
    assert [value.name for value in example.model.graph.input] == ["x", "y"], "the condition is a constant"


@pytest.mark.parametrize("op", [*SAME, *EXPRESSIONS])
def test_a_mapping_is_of_an_operator_and_names_its_operands(op: str) -> None:
    schema = onnx.defs.get_schema(op)
    assert any(p.name in expression_of(op) for p in schema.inputs)
    compile(expression_of(op), op, "eval")


# -- every operator -----------------------------------------------------------------------------------------

KNOWN = [c for c in coverage() if c.domain in ("", "ai.onnx.preview", "ai.onnx.preview.training")]


def attempt(covered: Coverage, against: str) -> Verification | str:
    with np.errstate(all="ignore"):
        try:
            return run_verify_op(covered.op_type, against=against)
        except (UsageError, UnsupportedError) as error:
            return error.message


@pytest.mark.slow
@pytest.mark.long
def test_every_operator_by_mathematics() -> None:
    results = {covered.op_type: (covered, attempt(covered, "math")) for covered in KNOWN}
    verified = {op: (c, result) for op, (c, result) in results.items() if isinstance(result, Verification)}
    assert len(verified) >= 140
    assert [op for op, (_, result) in verified.items() if not result.passed] == []
    contrary = [
        f"{op} {operand.name}"
        for op, (covered, result) in verified.items()
        for operand in (*covered.operands, *covered.outputs)
        if result.states.get(operand.name) == "gradient" and operand.state in ("zero", "no float")
    ]
    assert contrary == [], "what has a derivative here has one in the table too"


@pytest.mark.slow
@pytest.mark.long
def test_every_mapping_to_pytorch() -> None:
    results = {c.op_type: attempt(c, "torch") for c in KNOWN if c.op_type in {*SAME, *EXPRESSIONS}}
    made = {"Mish": [(2, 3)], "Trilu": [(3, 4), np.array(1)]}
    results |= {op: run_verify_op(op, against="torch", request=Request(inputs)) for op, inputs in made.items()}
    assert {op: result for op, result in results.items() if isinstance(result, str)} == {}
    assert [op for op, result in results.items() if isinstance(result, Verification) and not result.passed] == []
