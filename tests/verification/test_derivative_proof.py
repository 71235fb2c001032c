"""Models of derivatives are proved like training models: right ones pass, wrong ones fail and are not written."""

from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnx
import pytest

from onnxgrad_cli.autodiff import registry
from onnxgrad_cli.common.choices import SECOND_DERIVATIVES as SECOND, Derivative
from onnxgrad_cli.derivatives.kinds import derive
from onnxgrad_cli.jobs.check import run_check
from onnxgrad_cli.jobs.derive import run_derive
from onnxgrad_cli.metadata import read_derived
from onnxgrad_cli.options import Options
from onnxgrad_cli.verification.derivative_proof import prove_derived
from onnxgrad_cli.verification.findings import STILL
from onnxgrad_cli.verification.proof_checks import ORIGINAL
from onnxgrad_cli.verification.verdict import Proof
from tests.cli_harness import Shell

KINDS: tuple[Derivative, ...] = get_args(Derivative)
NET = """
<ir_version: 10, opset_import: ["" : 18]>
net (float[N, 4] x, float[N, 3] z) => (float[N, 3] y, float[N, 2] v)
<float[4, 3] w = {0.5, -0.2, 0.3, 0.1, 0.4, -0.6, 0.7, 0.2, -0.1, 0.3, -0.5, 0.6}, float[3, 2] u = {1, 2, 3, 4, 5, 6}>
{ h = MatMul(x, w) k = Mul(h, z) y = Tanh(k) v = MatMul(y, u) }
"""


def model_of(kind: Derivative, **options: bool) -> onnx.ModelProto:
    wrt = ["x", "z", "w"] if kind not in SECOND else ["x", "z"]
    return derive(onnx.parser.parse_model(NET), kind, wrt=wrt, **options)  # type: ignore[arg-type]


def proof_of(model: onnx.ModelProto, original: bool = True, seed: int = 0) -> Proof:
    said = read_derived(model)
    assert said is not None
    return prove_derived(model, said, original=onnx.parser.parse_model(NET) if original else None, seed=seed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.thinned(3)
def test_right_derivatives_are_proved(kind: Derivative) -> None:
    assert [proof_of(model_of(kind), seed=seed).verdict for seed in range(3)] == ["proved"] * 3
    alone = proof_of(model_of(kind, keep_outputs=True), original=False)
    assert alone.verdict == ("not_proved" if kind in (*SECOND, "gnvp") else "proved")
    assert ("--original" in alone.why) == (kind in (*SECOND, "gnvp"))


@pytest.mark.parametrize("kind", ["vjp", "jvp", "hvp"])
def test_right_derivatives_of_a_16_bit_model_are_proved(kind: Derivative) -> None:
    """Inputs move by less than the spacing of float16."""
    original = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 18]>
        g (float16[N, 3] x) => (float16[N, 3] y) { a = Tanh(x) y = Mul(a, x) }""")
    model = derive(original, kind)
    said = read_derived(model)
    assert said is not None
    proof = prove_derived(model, said, original=original)
    assert proof.verdict == "proved", proof.why


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_rule_fails(kind: Derivative) -> None:
    """A thousandth too much; of second derivatives what differentiates the gradient is wrong alone."""
    right = registry.lookup("Sub" if kind in SECOND else "Tanh", "", 18)
    assert right is not None
    with registry.scoped():
        if kind in SECOND:
            registry.rule("Sub", override=True)(lambda op, g, y, a, b: (g * 1.01, -g * 1.01))
        else:
            registry.rule("Tanh", override=True)(lambda op, g, y, x: g * (1 - y * y) * 1.01)
        model = model_of(kind)
    proof = proof_of(model)
    assert proof.failed, proof.steps
    assert "first derivatives" not in proof.why


def test_a_wrong_first_derivative_is_told_of_a_second_one() -> None:
    with registry.scoped():
        registry.rule("Tanh", override=True)(lambda op, g, y, x: g * (1 - y * y) * 1.01)
        proof = proof_of(model_of("hvp"))
    assert proof.failed and "first derivatives" in proof.why


def test_first_derivatives_of_another_function_prove_no_second_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """They agree with slopes of their own forward part, and not with the original."""

    def of_another(original: onnx.ModelProto, *kind: Any, **options: Any) -> onnx.ModelProto:
        other = onnx.ModelProto()
        other.CopyFrom(original)
        for node in other.graph.node:
            node.op_type = {"Tanh": "Sigmoid"}.get(node.op_type, node.op_type)
        return derive(other, *kind, **options)

    model = model_of("hvp")
    monkeypatch.setattr("onnxgrad_cli.verification.original_derivatives.derive", of_another)
    proof = proof_of(model)
    assert proof.failed and f"first derivatives: {ORIGINAL[0]}" in proof.why, proof.why


@pytest.mark.parametrize("row", [0, 1])
def test_a_wrong_row_of_a_jacobian_fails(row: int) -> None:
    model = model_of("jacobian", keep_outputs=True)
    name = "y_jacobian_w"
    for node in model.graph.node:
        node.output[:] = ["right" if output == name else output for output in node.output]
    factors = np.ones((1, 3, 1, 1), np.float32)
    factors[0, row] = 1.02
    model.graph.initializer.append(onnx.numpy_helper.from_array(factors, "factors"))
    model.graph.node.append(onnx.helper.make_node("Mul", ["right", "factors"], [name]))
    proof = proof_of(model)
    assert proof.failed and "w (" in proof.why


STRAIGHT = """
<ir_version: 10, opset_import: ["" : 18]> net (float[N, 4] x) => (float[N, 2] v)
<float[4, 3] w = {0.5, -0.2, 0.3, 0.1, 0.4, -0.6, 0.7, 0.2, -0.1, 0.3, -0.5, 0.6}, float[3, 2] u = {1, 2, 3, 4, 5, 6}>
{ h = MatMul(x, w) y = Relu(h) v = MatMul(y, u) }
"""


@pytest.mark.parametrize("kind", SECOND)
def test_straight_pieces_have_second_derivatives_that_are_proved_to_be_zero(kind: Derivative) -> None:
    original = onnx.parser.parse_model(STRAIGHT)
    model = derive(original, kind, wrt=["x"])
    said = read_derived(model)
    assert said is not None
    proof = prove_derived(model, said, original=original)
    assert proof.verdict == "proved"
    if kind in ("hvp", "hessian"):
        assert proof.steps[-1].detail.partition(", ")[2].startswith("and at 3 points")
    data = {name: np.ones((2, 4), np.float32) for name in ("x", *said.inputs)}
    given = prove_derived(model, said, original=original, data=data)
    assert given.verdict == "proved"


@pytest.mark.parametrize("kind", SECOND)
def test_a_zero_that_is_none_fails(kind: Derivative) -> None:
    original = onnx.parser.parse_model(NET)
    with registry.scoped():
        registry.rule("Sub", override=True)(lambda op, g, y, a, b: (g, None))
        model = derive(original, kind, wrt=["x"])
        said = read_derived(model)
        assert said is not None
        proof = prove_derived(model, said, original=original)
    assert proof.failed, proof.steps


def test_a_zero_of_these_data_alone_proves_nothing() -> None:
    squared = STRAIGHT.replace("-0", "0").replace("Relu(h)", "Relu(h) k = Mul(y, y)").replace("(y, u)", "(k, u)")
    original = onnx.parser.parse_model(squared)
    model = derive(original, "hvp", wrt=["x"])
    said = read_derived(model)
    assert said is not None
    data = {name: np.full((2, 4), size, np.float32) for name, size in zip(["x", *said.inputs], (-9, 1), strict=True)}
    proof = prove_derived(model, said, original=original, data=data)
    assert proof.verdict == "not_proved" and STILL in proof.why


def test_what_is_filled_with_ones_and_what_has_a_mode_of_training() -> None:
    assert proof_of(derive(onnx.parser.parse_model(NET), cotangents="ones")).verdict == "proved"
    text = """
    <ir_version: 10, opset_import: ["" : 18]> g (float[4, 3] x) => (float[4, 3] y)
    <float[3] s = {1, 2, 3}, float[3] b = {0, 1, 2}, float[3] m = {0.1, 0.2, 0.3}, float[3] v = {1, 2, 1}>
    { y = BatchNormalization(x, s, b, m, v) }
    """
    original = onnx.parser.parse_model(text)
    model = derive(original, wrt=["x", "s"], options=Options(mode="train"))
    said = read_derived(model)
    assert said is not None and said.mode == "train"
    proof = prove_derived(model, said, original=original)
    assert proof.verdict == "proved", proof.why


def test_derivatives_are_judged_as_they_are_written_and_checked_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(onnx.parser.parse_model(NET), "net.onnx")
    shell = Shell(tmp_path, capsys)
    done = shell("derive", "net.onnx", "--kind", "hvp", "--verify", "--dim", "N=3")
    assert done.code == 0 and "proved" in done.out, done.err
    np.savez("x.npz", x=np.ones((3, 4), np.float32))
    assert shell("check", "net.hvp.onnx", "--original", "net.onnx", "--data", "x.npz").code == 0
    unknown = shell("check", "net.hvp.onnx")
    assert unknown.code == 4 and "--original" in unknown.err
    with registry.scoped():
        registry.rule("Tanh", override=True)(lambda op, g, y, x: g * (1 - y))
        wrong = shell("derive", "net.onnx", "-o", "wrong.onnx")
        assert (wrong.code, wrong.facts[0]) == (4, "check_failed")
        assert not Path("wrong.onnx").exists()
        assert run_derive("net.onnx", "wrong.onnx", verify=False).proof is None
    assert run_check("wrong.onnx", original=Path("net.onnx")).failed


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("""g (float low, float high) => (float[a, b] y) <int32 bins = {0}, int32 length = {16}, int32 rate = {8192}>
         { y = MelWeightMatrix(bins, length, rate, low, high) }""", "not_proved"),
        ("""g (float depth, float[2] values) => (float[a, b] y) <int64[3] indices = {5, -6, -1}>
         { y = OneHot<axis = 0>(indices, depth, values) }""", "not_proved"),
    ],
)  # fmt: skip
def test_what_onnxruntime_runs_otherwise_or_on_few_data_is_told(text: str, verdict: str) -> None:
    """Onnx's reference gives no bins another shape; elsewhere another depth gives y another shape."""
    original = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 18]> {text}')
    model = derive(original, "vjp")
    said = read_derived(model)
    assert said is not None
    assert prove_derived(model, said, original=original).verdict == verdict


VERDICTS = {
    "sizes from data": ("float[3, 4] x", "float[3, K]", "bool[4] c = {1, 0, 1, 1}", "y = Compress <axis = 1> (x, c)"),
    "sizes from values": ("float[6] x", "float[K]", "", "y = Unique (x)"),
    "more channels than samples": (
        "float[2, 7, 3, 2] x",
        "float[2, 7, 3, 2]",
        "",
        "y = LRN <alpha = 0.3, size = 3> (x)",
    ),
    "a kernel of float64 in float32": ("float[30] x", "float[30]", "", "y = Shrink <bias = 0.2, lambd = 0.3> (x)"),
    "no kernel of float64 by its type": ("float[30] x", "float[30]", "", "y = Celu <alpha = 0.7> (x)"),
    "no value below 1": ("float[20] x", "float[20]", "", "y = Acosh (x)"),
    "no value beyond 1": ("float[20] x", "float[20]", "", "y = Atanh (x)"),
    "each input has a domain of its own": (
        "float[6] x, float[6] z, float[6] v",
        "float[6]",
        "",
        "a = Acosh (x) b = Atanh (z) c = Log (v) d = Add (a, b) y = Mul (c, d)",
    ),
    "zero between jumps": ("float[N, 1, M] x, float[1, K, M] z", "float[N, K, M]", "", "d = Div (x, z) y = Floor (d)"),
    "many small jumps": ("float[30] x", "float[30]", "float by = {1000}", "s = Mul (x, by) y = Round (s)"),
    "a slope between jumps": (
        "float[N, 1, M] x, float[1, K, M] z",
        "float[N, K, M]",
        "",
        "d = Div (x, z) f = Floor (d) y = Sub (x, f)",
    ),
    "constant among normal numbers": (
        "float[20] x",
        "float[20]",
        "float scale = {0.001}",
        "s = Mul (x, scale) r = Round (s) y = Div (r, scale)",
    ),
    "constants at jumps": (
        "float[8] x",
        "float[3]",
        "float[3] at = {0, 1, 2}, float two = {2}",
        "g = Mul (at, two) i = Cast <to = 7> (g) f = Cast <to = 1> (i) d = Sub (g, f) t = Gather (x, i) y = Sub (t, d)",
    ),
    "as many rows as are named": ("float[N, M] x", "float[5, 5]", "int64[2] shape = {5, 5}", "y = Expand (x, shape)"),
    "no elements": ("float[2, 0, 3] x", "float[2, 0, 3]", "", "y = Cos (x)"),
    "no elements of several inputs": (
        "float[2, 0] x, float[0, 3] z",
        "float[2, 3]",
        "float bias = {1}",
        "p = MatMul (x, z) y = Add (p, bias)",
    ),
    "a constant as large as can be": (
        "float[8] x",
        "float[3]",
        "float[3] at = {0, 1, 2}, float most = {3.4028235e38}",
        "i = Cast <to=7> (at) f = Cast <to=1> (i) d = Sub (at, f) t = Gather (x, i) s = Add (t, d) y = Min (s, most)",
    ),
    "an index that must not grow": (
        "float[1] x",
        "float[1]",
        "float[1] at = {0}",
        "c = Ceil (at) i = Cast <to = 7> (c) t = Gather (x, i) d = Sub (at, c) y = Add (t, d)",
    ),
    "a number alone that is an index": (
        "float x, int64 i",
        "float[1, 1]",
        "int64[2] ones = {1, 1}, int64 zero = {0}",
        """m = Reshape (x, ones) w = Reshape (i, ones) n = Less (w, zero) p = Where (n, zero, w)
        y = GatherElements <axis = 1> (m, p)""",
    ),
    "one tensor as both bounds": (
        "float[5, 5] x",
        "float[5, 5]",
        "float bound = {0.3}",
        "y = Clip (x, bound, bound)",
    ),
    "a constant": ("float[3] x", "float[3]", "float[3] y = {1, 2, 3}", ""),
}


@pytest.mark.parametrize("name", VERDICTS)
@pytest.mark.thinned(4)
def test_a_right_derivative_is_proved(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, output, constants, body = VERDICTS[name]
    text = f'<ir_version: 10, opset_import: ["" : 18]> g ({inputs}) => ({output} y) <{constants}> {{ {body} }}'
    assert_proved(text.replace("<>", ""), tmp_path, capsys, monkeypatch)


def assert_proved(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(onnx.parser.parse_model(text), "net.onnx")
    done = Shell(tmp_path, capsys)("derive", "net.onnx", "--kind", "vjp")
    assert done.code == 0 and "proof   proved" in done.out, done.out + done.err


def test_outputs_that_kernels_keep_in_float32_are_proved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """<ir_version: 10, opset_import: ["" : 18]>
        g (float[2, 5] x, float[5] s) => (float[2, 5] y, float[2, 1] mean, float[2, 1] deviation)
        { y, mean, deviation = LayerNormalization <epsilon = 0.5> (x, s) }"""
    assert_proved(text, tmp_path, capsys, monkeypatch)


@pytest.mark.parametrize("opset", [7, 9, 10])
def test_convolutions_of_old_opsets_are_proved(
    opset: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy in float64 has forms of Pad and Slice that came later."""
    text = f"""<ir_version: 4, opset_import: ["" : {opset}]>
        g (float[N, 2, 5, 5] x, float[3, 2, 3, 3] w, float[3] b) => (float[N, 3] y)
        {{ c = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (x, w, b) r = Relu (c)
           p = GlobalAveragePool (r) y = Flatten (p) }}"""
    assert_proved(text, tmp_path, capsys, monkeypatch)


def test_a_wrong_zero_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The derivative is zero where data are drawn first."""
    monkeypatch.chdir(tmp_path)
    text = """<ir_version: 10, opset_import: ["" : 18]>
        g (float[20] x) => (float[20] y) <float low = {5}> { y = Clip (x, low) }"""
    onnx.save(onnx.parser.parse_model(text), "net.onnx")
    with registry.scoped():
        registry.rule("Clip", override=True)(lambda op, g, y, x, low, high=None: (None, None, None))
        done = Shell(tmp_path, capsys)("derive", "net.onnx", "--wrt", "x")
    assert done.code == 4 and not Path("net.vjp.onnx").exists(), done.out + done.err


def test_results_that_are_no_numbers_in_both_are_no_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No data are in the domain of both functions."""
    monkeypatch.chdir(tmp_path)
    text = """<ir_version: 10, opset_import: ["" : 18]>
        g (float[6] x) => (float[6] y) { a = Acosh (x) b = Asin (x) y = Mul (a, b) }"""
    onnx.save(onnx.parser.parse_model(text), "net.onnx")
    done = Shell(tmp_path, capsys)("derive", "net.onnx", "--kind", "vjp")
    assert done.code == 0 and "not finite" in done.out, done.err


def test_random_numbers_are_no_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = """<ir_version: 10, opset_import: ["" : 18]> g (float[6] x) => (float[6] y)
        { r = RandomUniformLike (x) s = Mul (x, x) y = Mul (r, s) }"""
    onnx.save(onnx.parser.parse_model(text), "net.onnx")
    done = Shell(tmp_path, capsys)("derive", "net.onnx", "--kind", "vjp")
    assert done.code == 0 and "random numbers" in done.out, done.out + done.err
