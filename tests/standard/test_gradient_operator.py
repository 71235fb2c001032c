"""The Gradient operator: the tests the onnx package has for it, each example of its page in numbers, what is refused,
and the compact form of a training model. The numbers are PyTorch's, the package's, or counted by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper, parser
from onnx.backend.test.loader import load_model_tests

from onnxgrad_cli.builder import build
from onnxgrad_cli.errors import OnnxgradError, UnsupportedError, UsageError
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.metadata import describe
from onnxgrad_cli.options import Options
from onnxgrad_cli.record import Training
from onnxgrad_cli.standard.gradient_operator import expand_gradients
from tests.cli_harness import Shell
from tests.facts import raises

Arrays = dict[str, Any]
SAMPLES = Path(__file__).parents[2] / "sample_models"
PREVIEW = "ai.onnx.preview.training"
HEAD = '<ir_version: 8, opset_import: ["": 17, "ai.onnx.preview.training": 1, "own": 1]>'
GRADIENT = f"{PREVIEW}.Gradient"


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path, capsys)


def model(text: str) -> onnx.ModelProto:
    """The model of a text without its head."""
    return parser.parse_model(HEAD + text)


def expanded(text: str) -> onnx.ModelProto:
    """The model of a text, expanded: valid, and without a trace of the operator."""
    found = expand_gradients(model(text))
    onnx.checker.check_model(found, full_check=True)
    assert {node.domain for node in found.graph.node} <= {"", "ai.onnx"}
    assert PREVIEW not in {entry.domain for entry in found.opset_import}
    return found


def run(found: onnx.ModelProto, feeds: Arrays) -> Arrays:
    """Its outputs, on the stock onnxruntime."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = ort.InferenceSession(found.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, {name: np.asarray(x) for name, x in feeds.items()}), strict=True))


def draw(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def leaves(*arrays: np.ndarray) -> list[torch.Tensor]:
    return [torch.tensor(array, requires_grad=True) for array in arrays]


def close(got: np.ndarray, expected: torch.Tensor | np.ndarray) -> None:
    wanted = expected.detach().numpy() if isinstance(expected, torch.Tensor) else expected
    assert got.shape == wanted.shape
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


# -- what the onnx package tests --------------------------------------------------------------------------------------


PUBLISHED = {case.name: case for case in load_model_tests(kind="simple") if case.name.startswith("test_gradient_of")}


@pytest.mark.parametrize("name", ["test_gradient_of_add", "test_gradient_of_add_and_mul"])
def test_backend(name: str) -> None:
    """Model, inputs and outputs are those that the package ships."""
    case = PUBLISHED[name]
    found = expand_gradients(onnx.load(Path(case.model_dir) / "model.onnx"))
    data = Path(case.model_dir) / "test_data_set_0"

    def arrays(kind: str) -> list[np.ndarray]:
        files = sorted(data.glob(f"{kind}_*.pb"))
        return [numpy_helper.to_array(onnx.load_tensor(file)) for file in files]

    names = [value.name for value in found.graph.input]
    got = list(run(found, dict(zip(names, arrays("input"), strict=True))).values())
    assert len(got) == len(arrays("output")) == 3
    for ours, theirs in zip(got, arrays("output"), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=case.rtol, atol=case.atol)


def test_no_other_published_test_has_the_operator() -> None:
    assert sorted(PUBLISHED) == ["test_gradient_of_add", "test_gradient_of_add_and_mul"]


# -- the examples of the operator's page ------------------------------------------------------------------------------


NET = """
net (float[n, 1, 4, 4] X, float[2, 1, 3, 3] W, float[8, 3] Z OTHERS) => (OUTPUTS)
{
  H = Conv(X, W)
  F = Flatten(H)
  Y = Gemm(F, Z)
  GRADIENTS
}
"""
X, W, Z = draw((5, 1, 4, 4), (2, 1, 3, 3), (8, 3))


def net(outputs: str, gradients: str, others: str = "") -> onnx.ModelProto:
    text = NET.replace("OUTPUTS", outputs).replace("GRADIENTS", gradients).replace(" OTHERS", others)
    return expanded(text)


def head(h: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return h.flatten(1) @ z


def test_gradients_against_inputs() -> None:
    """Y is no scalar: the gradient is that of the sum of its elements."""
    found = net("float[n, 3] Y, float[n, 2, 2, 2] H, float[2, 1, 3, 3] dW, float[8, 3] dZ",
                f'dW, dZ = {GRADIENT}<xs = ["W", "Z"], zs = ["X"], y = "Y">(W, Z, X)')  # fmt: skip
    got = run(found, {"X": X, "W": W, "Z": Z})
    x, w, z = leaves(X, W, Z)
    h = torch.conv2d(x, w)
    y = head(h, z)
    dw, dz = torch.autograd.grad(y.sum(), [w, z])
    for name, expected in {"Y": y, "H": h, "dW": dw, "dZ": dz}.items():
        close(got[name], expected)
    assert sum(node.op_type == "Conv" for node in found.graph.node) >= 1


def test_the_forward_values_are_reused() -> None:
    found = net("float[n, 3] Y, float[8, 3] dZ", f'dZ = {GRADIENT}<xs = ["Z"], zs = ["H"], y = "Y">(Z, H)')
    assert sum(node.op_type == "Conv" for node in found.graph.node) == 1
    assert sum(node.op_type == "Flatten" for node in found.graph.node) == 1


def test_an_output_is_skipped() -> None:
    proto = model(NET.replace("OUTPUTS", "float[8, 3] dZ").replace("GRADIENTS", "").replace(" OTHERS", ""))
    proto.graph.node.append(
        helper.make_node("Gradient", ["W", "Z", "X"], ["", "dZ"], domain=PREVIEW, xs=["W", "Z"], zs=["X"], y="Y")
    )
    found = expand_gradients(proto)
    x, w, z = leaves(X, W, Z)
    close(run(found, {"X": X, "W": W, "Z": Z})["dZ"], torch.autograd.grad(head(torch.conv2d(x, w), z).sum(), [z])[0])
    assert sum(node.op_type in ("Conv", "ConvTranspose") for node in found.graph.node) == 1  # none for dW


def test_trailing_outputs_may_be_missing() -> None:
    found = net("float[2, 1, 3, 3] dW", f'dW = {GRADIENT}<xs = ["W", "Z"], zs = ["X"], y = "Y">(W, Z, X)')
    x, w, z = leaves(X, W, Z)
    close(run(found, {"X": X, "W": W, "Z": Z})["dW"], torch.autograd.grad(head(torch.conv2d(x, w), z).sum(), [w])[0])


def test_gradients_against_an_intermediate() -> None:
    """Neither X nor W is named: H holds all that Y needs of them."""
    found = net("float[n, 2, 2, 2] dH, float[8, 3] dZ", f'dH, dZ = {GRADIENT}<xs = ["H", "Z"], y = "Y">(H, Z)')
    got = run(found, {"X": X, "W": W, "Z": Z})
    h, z = leaves(torch.conv2d(torch.tensor(X), torch.tensor(W)).numpy(), Z)
    for name, expected in zip(("dH", "dZ"), torch.autograd.grad(head(h, z).sum(), [h, z]), strict=True):
        close(got[name], expected)


def test_other_values_are_fed() -> None:
    """The graph between H, Z and Y is taken at H_1 and Z_1; the model's own Y stays what it was."""
    found = net("float[n, 3] Y, float[m, 2, 2, 2] dH, float[8, 3] dZ",
                f'dH, dZ = {GRADIENT}<xs = ["H", "Z"], y = "Y">(H_1, Z_1)',
                ", float[m, 2, 2, 2] H_1, float[8, 3] Z_1")  # fmt: skip
    h1, z1 = draw((3, 2, 2, 2), (8, 3))
    got = run(found, {"X": X, "W": W, "Z": Z, "H_1": h1, "Z_1": z1})
    h, z = leaves(h1, z1)
    for name, expected in zip(("dH", "dZ"), torch.autograd.grad(head(h, z).sum(), [h, z]), strict=True):
        close(got[name], expected)
    close(got["Y"], head(torch.conv2d(torch.tensor(X), torch.tensor(W)), torch.tensor(Z)))


SECOND = f"""
second (float[n, 4] X, float[4, 3] W, float[n, 3] L) => (float O, float[n, 4] dX, float[4, 3] dW, float[n, 4] dWX,
                                                         float[4, 3] dWW)
{{
  Y = Gemm(X, W)
  D = Sub(Y, L)
  S = Tanh(D)
  Q = Mul(S, D)
  O = ReduceMean<keepdims = 0>(Q)
  dX, dW = {GRADIENT}<xs = ["X", "W"], zs = ["L"], y = "O">(X, W, L)
  dWX, dWW = {GRADIENT}<xs = ["X", "W"], zs = ["L"], y = "dW">(X, W, L)
}}
"""


def test_second_order() -> None:
    """d(dO/dW)/dX and d2O/dW2, against the double backward of PyTorch."""
    x0, w0, l0 = draw((6, 4), (4, 3), (6, 3))
    got = run(expanded(SECOND), {"X": x0, "W": w0, "L": l0})
    x, w, label = leaves(x0, w0, l0)
    d = x @ w - label
    o = (torch.tanh(d) * d).mean()
    dx, dw = torch.autograd.grad(o, [x, w], create_graph=True)
    dwx, dww = torch.autograd.grad(dw.sum(), [x, w])
    for name, expected in {"O": o, "dX": dx, "dW": dw, "dWX": dwx, "dWW": dww}.items():
        close(got[name], expected)


def test_third_order_by_hand() -> None:
    """x^4 has the derivatives 4 x^3, 12 x^2 and 24 x; the nodes stand in the wrong order."""
    found = expanded(f"""
    cube (float[2] x) => (float[2] a, float[2] b, float[2] c)
    {{
      c = {GRADIENT}<xs = ["x"], y = "b">(x)
      b = {GRADIENT}<xs = ["x"], y = "a">(x)
      a = {GRADIENT}<xs = ["x"], y = "y">(x)
      s = Mul(x, x)
      y = Mul(s, s)
    }}""")
    x = np.array([1.5, -2.0], np.float32)
    got = run(found, {"x": x})
    for name, expected in {"a": 4 * x**3, "b": 12 * x**2, "c": 24 * x}.items():
        np.testing.assert_allclose(got[name], expected, rtol=1e-5)


# -- what else can be fed, named and written --------------------------------------------------------------------------


def test_copies_of_what_is_fed_are_gone() -> None:
    """onnxruntime 1.31 loses the Identity of an input that is multiplied with a quotient 1 / b."""
    found = expanded(f"""
        net (double[2] x, double[2] s, double[2] f) => (double[2] d)
        {{ q = Mul(s, s)  r = Sqrt(q)  y = Div(x, r)  d = {GRADIENT} <xs = ["x"], zs = ["s"], y = "y"> (f, s) }}""")
    assert "Identity" not in {node.op_type for node in found.graph.node}
    norm = expanded(f"""
        net (double[1, 2, 1] x, double[2] s, double[2] b, double[2] f) => (double[1, 2, 1] d) <double[2] v = {{4, 9}}>
        {{
          y = BatchNormalization <epsilon = 0.0> (x, s, b, b, v)
          d = {GRADIENT} <xs = ["x"], zs = ["s", "b"], y = "y"> (x, s, f)
        }}""")
    close(
        run(norm, {"x": np.ones((1, 2, 1)), "s": [3.0, 6.0], "b": [0.0, 0.0], "f": [1.0, 1.0]})["d"],
        np.array([[[1.5], [2.0]]]),
    )


def test_each_of_two_names_that_are_fed_one_value_has_its_own_derivative() -> None:
    """d(ab)/da at (3, 3) is 3, not 6."""
    found = expanded(f"""
    product (float a, float b, float t) => (float da, float db)
    {{
      c = Mul(a, b)
      da, db = {GRADIENT}<xs = ["a", "b"], y = "c">(t, t)
    }}""")
    assert run(found, {"t": np.float32(3), "a": np.float32(5), "b": np.float32(7)}) == {"da": 3, "db": 3}


def test_a_fed_value_may_depend_on_another() -> None:
    """d(ab)/da at (t, t^2) is t^2: how what is fed was made does not matter."""
    found = expanded(f"""
    product (float a, float b, float t) => (float da, float db)
    {{
      c = Mul(a, b)
      s = Mul(t, t)
      da, db = {GRADIENT}<xs = ["a", "b"], y = "c">(t, s)
    }}""")
    assert run(found, {"t": np.float32(3), "a": np.float32(5), "b": np.float32(7)}) == {"da": 9, "db": 3}


@pytest.mark.parametrize(("stored", "computed"), [("int64 k = {2}", ""), ("int64 j = {2}", "k = Mul(j, one)")])
def test_a_named_value_that_looks_constant_can_be_fed_another(stored: str, computed: str) -> None:
    """p = 2k is 4 in the model, be k stored or computed; where k is fed 3, p is 6, and d(x p)/dx with it."""
    found = expanded(
        f"""
    power (float[2] x, int64 t) => (float[2] y, float[2] at_k, float[2] at_t)
    <STORED, int64 one = {{1}}, int64 two = {{2}}>
    {{
      COMPUTED
      p = Mul(k, two)
      f = Cast<to = 1>(p)
      y = Mul(x, f)
      at_k = {GRADIENT}<xs = ["x"], zs = ["k"], y = "y">(x, k)
      at_t = {GRADIENT}<xs = ["x"], zs = ["k"], y = "y">(x, t)
    }}""".replace("STORED", stored).replace("COMPUTED", computed)
    )
    got = run(found, {"x": np.ones(2, np.float32), "t": np.int64(3)})
    assert [got[name][0] for name in ("y", "at_k", "at_t")] == [4, 4, 6]


def test_a_branch_is_copied_with_the_condition_that_is_fed() -> None:
    found = expanded(f"""
    choice (float x, bool other) => (float at_own, float at_other)
    <bool own = {{1}}>
    {{
      y = If(own) <then_branch = g1 () => (float a) {{ a = Mul(x, x) }},
                   else_branch = g2 () => (float b) {{ b = Neg(x) }}>
      at_own = {GRADIENT}<xs = ["x"], zs = ["own"], y = "y">(x, own)
      at_other = {GRADIENT}<xs = ["x"], zs = ["own"], y = "y">(x, other)
    }}""")
    assert run(found, {"x": np.float32(5), "other": np.array(False)}) == {"at_own": 10, "at_other": -1}


def test_a_loop_is_differentiated() -> None:
    """y = x^(2^3): dy/dx = 8 x^7."""
    found = expanded(f"""
    loop (float x) => (float y, float d)
    <int64 n = {{3}}, bool go = {{1}}>
    {{
      y = Loop(n, go, x) <body = step (int64 i, bool c, float s) => (bool d, float t) {{
        d = Identity(c)
        t = Mul(s, s)
      }}>
      d = {GRADIENT}<xs = ["x"], y = "y">(x)
    }}""")
    got = run(found, {"x": np.float32(1.1)})
    np.testing.assert_allclose([got["y"], got["d"]], [1.1**8, 8 * 1.1**7], rtol=1e-5)


def test_what_has_no_influence_has_zeros() -> None:
    training = Training()
    found = expand_gradients(model(f"""
    none (float[n, 2] x, float[3] u) => (float[n, 2] dx, float[3] du, float[n, 2] ds)
    {{
      s = Sign(x)
      y = ReduceSum<keepdims = 0>(s)
      dx, du = {GRADIENT}<xs = ["x", "u"], y = "y">(x, u)
      ds = {GRADIENT}<xs = ["s"], y = "s">(s)
    }}"""), training=training)  # fmt: skip
    got = run(found, {"x": np.ones((4, 2), np.float32), "u": np.ones(3, np.float32)})
    assert got["dx"].shape == (4, 2) and not got["dx"].any()
    assert got["du"].shape == (3,) and not got["du"].any()
    assert got["ds"].shape == (4, 2) and (got["ds"] == 1).all()
    assert [c.subject for c in training.cautions if c.kind == "zero gradient"] == ["x", "u"]


def test_initializers_are_constants_or_named() -> None:
    """An initializer that is not named is a constant, and one that is gets its gradient, overridable or not."""
    found = expanded(f"""
    weights (float x, float v) => (float dx, float dw, float dv)
    <float w = {{3}}, float v = {{4}}, float c = {{5}}>
    {{
      a = Mul(x, w)
      b = Mul(a, v)
      y = Mul(b, c)
      dx = {GRADIENT}<xs = ["x"], y = "y">(x)
      dw, dv = {GRADIENT}<xs = ["w", "v"], zs = ["x"], y = "y">(w, v, x)
    }}""")
    assert [value.name for value in found.graph.input] == ["x", "v"]
    assert run(found, {"x": np.float32(2)}) == {"dx": 60, "dw": 40, "dv": 30}
    assert run(found, {"x": np.float32(2), "v": np.float32(1)}) == {"dx": 15, "dw": 10, "dv": 30}


@pytest.mark.parametrize("dtype", ["double", "float16"])
def test_types(dtype: str) -> None:
    found = expanded(f"""
    typed ({dtype}[3] x) => ({dtype}[3] dx)
    {{
      y = Mul(x, x)
      dx = {GRADIENT}<xs = ["x"], y = "y">(x)
    }}""")
    x = np.array([1, 2, 3], "float16" if dtype == "float16" else "float64")
    got = run(found, {"x": x})["dx"]
    assert got.dtype == x.dtype
    assert got.tolist() == [2, 4, 6]


@pytest.mark.parametrize("opset", [7, 9, 11, 12])
def test_old_opsets(opset: int) -> None:
    """Axes are attributes there; the opset is raised, and what the model computes stays."""
    proto = parser.parse_model(f"""<ir_version: 7, opset_import: ["": {opset}, "{PREVIEW}": 1]>
    old (float[n, 3] x) => (float[n] y, float[n, 3] dx)
    {{
      e = Exp(x)
      s = ReduceSum<axes = [1], keepdims = 0>(e)
      y = Log(s)
      dx = {GRADIENT}<xs = ["x"], y = "y">(x)
    }}""")
    training = Training()
    found = expand_gradients(proto, training=training)
    (x0,) = draw((4, 3))
    got = run(found, {"x": x0})
    close(got["y"], torch.logsumexp(torch.tensor(x0), 1))
    close(got["dx"], torch.softmax(torch.tensor(x0), 1))
    assert any(caution.kind == "opset change" for caution in training.cautions)


def test_old_ir_versions_keep_their_inputs() -> None:
    proto = parser.parse_model(f"""<ir_version: 3, opset_import: ["": 9, "{PREVIEW}": 1]>
    old (float[2] x, float[2] w) => (float[2] dw)
    <float[2] w = {{1, 2}}>
    {{
      a = Mul(x, w)
      y = Mul(a, w)
      dw = {GRADIENT}<xs = ["w"], zs = ["x"], y = "y">(w, x)
    }}""")
    found = expand_gradients(proto)
    assert [value.name for value in found.graph.input] == ["x", "w"]
    x = np.array([3, 4], np.float32)
    assert run(found, {"x": x})["dw"].tolist() == [6, 16]
    assert run(found, {"x": x, "w": x})["dw"].tolist() == [18, 32]


FUNCTION = """
<domain: "own", opset_import: ["": 17]>
scaled (a, b) => (c)
{
  m = Mul(a, b)
  c = Tanh(m)
}
"""


def test_functions_on_the_way() -> None:
    found = expanded(f"""
    main (float[3] x, float[3] w) => (float[3] y, float[3] dx, float[3] dw)
    {{
      h = own.scaled(x, w)
      y = own.scaled(h, w)
      dx, dw = {GRADIENT}<xs = ["x", "w"], y = "y">(x, w)
    }}{FUNCTION}""")
    assert not found.functions
    x0, w0 = draw((3,), (3,))
    x, w = leaves(x0, w0)
    y = torch.tanh(torch.tanh(x * w) * w)
    got = run(found, {"x": x0, "w": w0})
    for name, expected in zip(("y", "dx", "dw"), [y, *torch.autograd.grad(y.sum(), [x, w])], strict=True):
        close(got[name], expected)


WITH_GRADIENT = f"""
<domain: "own", opset_import: ["": 17, "{PREVIEW}": 1, "own": 1]>
both (a, b) => (y, da, db)
{{
  da, db = {GRADIENT}<xs = ["a", "b"], y = "y">(a, b)
  y = own.scaled(a, b)
}}
"""


def test_a_gradient_in_a_function() -> None:
    """It names the function's own values: derivatives are with respect to its inputs, whatever a caller passes."""
    found = expanded(f"""
    main (float[3] x, float[3] w) => (float[3] da, float[3] db, float[3] ea, float[3] eb, float[3] fx)
    {{
      s, da, db = own.both(x, w)
      t, ea, eb = own.both(s, s)
      fx = {GRADIENT}<xs = ["x"], zs = ["w"], y = "ea">(x, w)
    }}{FUNCTION}{WITH_GRADIENT}""")
    x0, w0 = draw((3,), (3,))
    x, w = leaves(x0, w0)
    s = torch.tanh(x * w)
    da, db = torch.autograd.grad(s.sum(), [x, w], create_graph=True)
    e = s * (1 - torch.tanh(s * s) ** 2)
    (fx,) = torch.autograd.grad(e.sum(), [x])
    got = run(found, {"x": x0, "w": w0})
    for name, expected in {"da": da, "db": db, "ea": e, "eb": e, "fx": fx}.items():
        close(got[name], expected)


def test_a_step_that_uses_the_gradient() -> None:
    """The nodes that read the result stand before those that make y; dead nodes of the model stay."""
    found = expanded(f"""
    step (float[2] w, float rate) => (float[2] w_next, float y)
    {{
      g = {GRADIENT}<xs = ["w"], y = "y">(w)
      d = Mul(g, rate)
      w_next = Sub(w, d)
      dead = Neg(w)
      s = Mul(w, w)
      y = ReduceSum<keepdims = 0>(s)
    }}""")
    w = np.array([1, -2], np.float32)
    got = run(found, {"w": w, "rate": np.float32(0.25)})
    assert got["w_next"].tolist() == [0.5, -1.0]
    assert got["y"] == 5
    assert "dead" in {name for node in found.graph.node for name in node.output}


def test_a_model_without_the_operator_stays_as_it_is() -> None:
    proto = parser.parse_model('<ir_version: 3, opset_import: ["": 9]> m (float x) => (float y) { y = Neg(x) }')
    before = proto.SerializeToString()
    assert expand_gradients(proto) is proto
    assert proto.SerializeToString() == before


# -- what is refused --------------------------------------------------------------------------------------------------


def misused(attributes: str, fed: str, outputs: str = "g", before: str = "") -> str:
    return f"""
    misused (float[2] a, float[2] b, int64[2] i, float[2, 2] m) => (float[2] y)
    <float[2] w = {{1, 2}}>
    {{
      {before}
      h = Mul(a, w)
      y = Mul(h, b)
      n = ArgMax(y)
      [grad] {outputs} = {GRADIENT}<{attributes}>({fed})
    }}"""


@pytest.mark.parametrize(
    ("text", "expected", "hint"),
    [
        (misused('xs = ["q"], zs = ["b"], y = "y"', "a, b"), ("unknown_name", "grad", "q"), "tensors:"),
        (misused('xs = ["a"], zs = ["hh"], y = "y"', "a, b"), ("unknown_name", "grad", "hh"), "did you mean h"),
        (misused('xs = ["a"], zs = ["b"], y = "z"', "a, b"), ("unknown_name", "grad", "z"), "tensors:"),
        (misused('xs = ["h"], zs = ["a", "b"], y = "y"', "h, a, b"), ("conflict", "grad", "h", "a"),
         "leave out 'h' or 'a'"),
        (misused('xs = ["a", "y"], zs = ["b"], y = "y"', "a, y, b"), ("conflict", "grad", "y", "a", "b"), "a"),
        (misused('xs = ["a"], y = "y"', "a"), ("missing_value", "grad", "y", "b"), "or to zs"),
        (misused('xs = ["w"], y = "y"', "w"), ("missing_value", "grad", "y", "a", "b"), "add each input"),
        (misused('xs = ["a", "a"], zs = ["b"], y = "y"', "a, a, b"), ("wrong_value", "grad", "a"), "once"),
        (misused('xs = ["a"], zs = ["b", "a"], y = "y"', "a, b, a"), ("wrong_value", "grad", "a"), "once"),
        (misused('xs = ["a"], zs = ["b"], y = "y"', "a"), ("wrong_shape", "grad", "1", "2"), "one input"),
        (misused('xs = ["a"], zs = ["b"], y = "y"', "a, b, w"), ("wrong_shape", "grad", "3", "2"), "one input"),
        (misused('xs = ["a"], zs = ["b"], y = "y"', "a, b", "g, k"), ("wrong_shape", "grad", "2", "1"), "same order"),
        (misused('xs = ["i"], zs = ["a", "b"], y = "y"', "i, a, b"), ("wrong_type", "grad", "i", "int64", "2"), "zs"),
        (misused('xs = ["a"], zs = ["b"], y = "n"', "a, b"), ("wrong_type", "grad", "n", "int64", "1"), "float"),
        (misused('xs = ["a"], zs = ["b"], y = "y"', "i, b"),
         ("wrong_type", "grad", "i", "int64", "2", "a", "2"), "rank"),
        (misused('xs = ["a"], zs = ["b"], y = "y"', "m, b"), ("wrong_type", "grad", "m", "2", "2", "a", "2"), "rank"),
        (misused('xs = ["a"], zs = ["b"], y = "q"', "a, b", "g", "p = Neg(g)\n q = Add(p, y)"),
         ("conflict", "grad", "q"), "copies"),
    ],
)  # fmt: skip
def test_misuse(text: str, expected: tuple[str, ...], hint: str) -> None:
    with raises(UsageError, *expected) as error:
        expand_gradients(model(text))
    assert hint in (error.value.hint or "")


def test_a_missing_attribute_is_told() -> None:
    proto = model(misused('xs = ["a"], zs = ["b"], y = "y"', "a, b"))
    del proto.graph.node[-1].attribute[-1]
    with raises(UsageError, "unknown_name", "grad", ""):
        expand_gradients(proto)


def test_names_in_a_function_are_those_of_the_function() -> None:
    broken = WITH_GRADIENT.replace('y = "y"', 'y = "x"')
    with raises(UsageError, "unknown_name", "da", "x", "both"):
        expand_gradients(model(f"main (float x) => (float s) {{ s, a, b = own.both(x, x) }}{FUNCTION}{broken}"))


def test_a_body_is_refused() -> None:
    text = f"""
    choice (float x, bool c) => (float d)
    {{
      y = Mul(x, x)
      [pick] d = If(c) <then_branch = g1 () => (float a) {{ [inner] a = {GRADIENT}<xs = ["x"], y = "y">(x) }},
                        else_branch = g2 () => (float b) {{ b = Neg(x) }}>
    }}"""
    with raises(UnsupportedError, "refused", "inner", "pick"):
        expand_gradients(model(text))


def test_what_has_no_rule_is_refused_by_name() -> None:
    text = f"""
    unknown (float x) => (float d)
    {{
      [turn] y = own.Twirl(x)
      d = {GRADIENT}<xs = ["x"], y = "y">(x)
    }}"""
    with raises(UnsupportedError, "refused", "turn", "own::Twirl", "y"):
        expand_gradients(model(text))


def test_shapes_that_do_not_fit_are_refused() -> None:
    text = f"""
    shapes (float[2] a, float[2] b, float[3] c) => (float[3] d)
    {{
      y = Mul(a, b)
      d = {GRADIENT}<xs = ["a"], zs = ["b"], y = "y">(c, b)
    }}"""
    with raises(OnnxgradError, "failed", "Mul_y_1"):
        expand_gradients(model(text))


# -- the compact form of a training model -----------------------------------------------------------------------------


LOSSES = {"linear_regression": "mse"}


def options(name: str, compact: bool, **more: object) -> Options:
    losses = (LossSpec(LOSSES.get(name, "cross-entropy")),)
    return Options(losses=losses, label="label", as_gradient_op=compact, **more)  # type: ignore[arg-type]


def feeds(name: str) -> Arrays:
    rng = np.random.default_rng(0)
    if name == "linear_regression":
        x, y = rng.standard_normal((5, 3)), rng.standard_normal((5, 1))
        return {"x": x.astype(np.float32), "label": y.astype(np.float32)}
    if name == "tiny_transformer":
        return {"input_ids": rng.integers(0, 4, (3, 7)), "label": rng.integers(0, 4, 3)}
    if name == "symbolic":
        x, mask = rng.standard_normal((3, 6, 12)).astype(np.float32), np.ones((3, 6), np.bool_)
        return {"x": x, "mask": mask, "label": rng.integers(0, 5, 3)}
    return {"x": rng.standard_normal((4, 1, 8, 8)).astype(np.float32), "label": rng.integers(0, 10, 4)}


def test_second_order_of_a_training_model() -> None:
    """Another Gradient on top of the compact form: the Hessian of the loss times ones, as PyTorch has it."""
    compact = build(onnx.load(SAMPLES / "digits_mlp.onnx"), options("digits_mlp", True)).model
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in compact.graph.initializer}
    names = [name for name, role in describe(compact).inputs.items() if role == "weight"]
    compact.graph.node.append(
        helper.make_node(
            "Gradient", [*names, "x", "label"], [f"{name}_second" for name in names], domain=PREVIEW,
            xs=names, zs=["x", "label"], y="fc2.weight_grad",
        )
    )  # fmt: skip
    for name in names:
        value = helper.make_tensor_value_info(f"{name}_second", TensorProto.FLOAT, stored[name].shape)
        compact.graph.output.append(value)
    got = run(expand_gradients(compact), feeds("digits_mlp"))
    weights = dict(zip(names, leaves(*(stored[name] for name in names)), strict=True))
    data = feeds("digits_mlp")
    h = torch.tensor(data["x"]).flatten(1)
    for layer in (1, 2, 3):
        h = h @ weights[f"fc{layer}.weight"].T + weights[f"fc{layer}.bias"]
        h = torch.relu(h) if layer < 3 else h
    loss = torch.nn.functional.cross_entropy(h, torch.tensor(data["label"]))
    (first,) = torch.autograd.grad(loss, [weights["fc2.weight"]], create_graph=True)
    close(got["fc2.weight_grad"], first)
    second = torch.autograd.grad(first.sum(), list(weights.values()), allow_unused=True, materialize_grads=True)
    for name, expected in zip(names, second, strict=True):
        close(got[f"{name}_second"], expected)


def test_the_command(shell: Shell) -> None:
    """The model is proven by what it stands for, and the report says what is in it."""
    source = SAMPLES / "digits_mlp.onnx"
    result = shell("build", source, "--loss", "cross-entropy", "--as-gradient-op", "-o", "compact.onnx", "--json")
    assert result.code == 0, result.err
    report = result.json
    assert [row["name"] for row in report["passes"]][:4] == ["prepare", "loss", "gradient", "outputs"]
    assert report["proof"]["status"] == "passed"
    assert report["cost"]["nodes"]["backward"] == 1
    assert any("onnxgrad expand" in step["text"] for step in report["next"])
    assert not any(step["language"] == "python" for step in report["next"])
    assert "backward" in (shell.folder / "compact.onnx.report.md").read_text()
    assert shell("check", "compact.onnx").code == 0
