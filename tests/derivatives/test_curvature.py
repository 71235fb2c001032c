"""Diagonals of Hessians, Laplacians, Gauss-Newton products and weights of outputs, against torch.func."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import ModelProto, parser
from torch import Tensor, nn

from onnxgrad_cli.autodiff import registry
from onnxgrad_cli.common.choices import WEIGHTED_DERIVATIVES, Derivative
from onnxgrad_cli.derivatives.kinds import derive
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import No, Val
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.metadata import read_derived
from onnxgrad_cli.verification.derivative_proof import prove_derived
from onnxgrad_cli.verification.verdict import Proof
from tests.cli_harness import Shell
from tests.derivatives.test_kinds import Arrays, Net, _export, net, run
from tests.facts import raises

NETS = ("perceptron", "convolutional", "transformer")
CURVATURES: tuple[Derivative, ...] = ("gnvp", "hessian-diagonal", "laplacian")
BATCH = 3


def points(name: str, batch: int = BATCH) -> tuple[Net, dict[str, Tensor]]:
    subject = net(name)
    torch.manual_seed(3)
    return subject, {key: torch.randn((batch, *x.shape[1:]), dtype=x.dtype) for key, x in subject.inputs.items()}


def agrees(found: np.ndarray, wanted: Tensor, tolerance: float) -> None:
    assert found.shape == tuple(wanted.shape)
    error = np.abs(found - wanted.detach().numpy()).max() / float(wanted.detach().abs().max())
    assert error <= tolerance, f"{error:.1e}"


def diagonal(hessian: Tensor, shape: torch.Size) -> Tensor:
    return torch.diagonal(hessian.reshape(shape.numel(), shape.numel())).reshape(shape)


def of_samples(kind: str, subject: Net, inputs: dict[str, Tensor], weights: Tensor, vectors: list[Tensor]) -> Arrays:
    """The derivatives of each sample with weights of the outputs, by torch.func.vmap."""

    def one(*x: Tensor) -> Tensor:
        return subject.function(list(inputs), subject.outputs)(*(each[None] for each in x))[0][0]

    def each(weight: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        x, v = given[: len(inputs)], given[len(inputs) :]
        if kind == "gnvp":
            return torch.func.vjp(one, *x)[1](weight * torch.func.jvp(one, x, v)[1])
        every = tuple(range(len(x)))
        hessian = torch.func.hessian(lambda *x: (weight * one(*x)).sum(), every)(*x)
        found = tuple(diagonal(hessian[i][i], x[i].shape) for i in every)
        return tuple(value.sum() for value in found) if kind == "laplacian" else found

    values = torch.func.vmap(each)(weights, *inputs.values(), *(vectors if kind == "gnvp" else []))
    return {f"{x}_{kind.replace('-', '_')}": value for x, value in zip(inputs, values, strict=True)}


@pytest.mark.parametrize("sizes", ["fixed", "any"])
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("kind", CURVATURES)
@pytest.mark.thinned(3)
def test_derivatives_of_samples_are_those_of_vmap(kind: Derivative, name: str, sizes: str) -> None:
    subject, inputs = points(name, 2 if sizes == "fixed" else BATCH)
    (output,) = subject.function(list(inputs), subject.outputs)(*inputs.values())
    weights, vectors = torch.randn_like(output), [torch.randn_like(x) for x in inputs.values()]
    model = derive(subject.model[sizes], kind, per_sample=True, weighted=True)
    given = {f"{x}_vector": v.numpy() for x, v in zip(inputs, vectors, strict=True)} if kind == "gnvp" else {}
    found = run(model, {**{x: v.numpy() for x, v in inputs.items()}, "y_weight": weights.numpy(), **given})
    wanted = of_samples(kind, subject, inputs, weights, vectors)
    assert list(found) == list(wanted)
    for key, value in wanted.items():
        agrees(found[key], value, subject.tolerance)


def test_gauss_newton_products_of_each_sample_by_a_weight() -> None:
    """The vector is the same for all samples, and each has a product of its own."""
    subject, inputs = points("convolutional")
    weight = subject.weights["a.weight"]
    vector = torch.randn_like(weight)
    model = derive(subject.model["any"], "gnvp", wrt="a.weight", per_sample=True)
    found = run(model, {"x": inputs["x"].numpy(), "a.weight_vector": vector.numpy()})["a.weight_gnvp"]

    def product(x: Tensor) -> Tensor:
        def one(w: Tensor) -> Tensor:
            return torch.func.functional_call(subject.module, {**subject.weights, "a.weight": w}, (x[None],))[0]

        return torch.func.vjp(one, weight)[1](torch.func.jvp(one, (weight,), (vector,))[1])[0]

    agrees(found, torch.stack([product(x) for x in inputs["x"]]), subject.tolerance)


@pytest.mark.parametrize("kind", WEIGHTED_DERIVATIVES)
def test_weights_of_several_outputs(kind: Derivative) -> None:
    """The outputs have other shapes, and the second does not depend on z."""
    subject = net("elementwise")
    names = ["w", "u"]
    outputs = subject.function(list("xz"), names)(*subject.inputs.values())
    weights = dict(zip(("u", "w"), map(torch.randn_like, outputs), strict=True))
    vectors = tuple(map(torch.randn_like, subject.inputs.values()))
    given = {f"{y}_weight": w.numpy() for y, w in weights.items()}
    if kind in ("hvp", "gnvp"):
        given |= {f"{x}_vector": v.numpy() for x, v in zip("xz", vectors, strict=True)}
    model = derive(subject.model["fixed"], kind, of=names, weighted=True)
    assert read_derived(model).weights == ("w_weight", "u_weight")  # type: ignore[union-attr]
    found = list(run(model, {**subject.feeds, **given}).values())

    def total(*x: Tensor) -> Tensor:
        u, w = subject.function(list("xz"), names)(*x)
        return (weights["u"] * u).sum() + (weights["w"] * w).sum()

    at = tuple(subject.inputs.values())
    hessian = torch.func.hessian(total, (0, 1))(*at)
    diagonals = [diagonal(hessian[i][i], x.shape) for i, x in enumerate(at)]
    function = subject.function(list("xz"), names)
    tangents = torch.func.jvp(function, at, vectors)[1]
    wanted = {
        "hvp": lambda: torch.func.jvp(torch.func.grad(total, (0, 1)), at, vectors)[1],
        "gnvp": lambda: torch.func.vjp(function, *at)[1](
            tuple(weights[y] * t for y, t in zip(("u", "w"), tangents, strict=True))
        ),
        "hessian": lambda: [hessian[i][j] for i in (0, 1) for j in (0, 1)],
        "hessian-diagonal": lambda: diagonals,
        "laplacian": lambda: [value.sum() for value in diagonals],
    }[kind]()
    for value, expected in zip(found, wanted, strict=True):
        agrees(value, expected, subject.tolerance)
    assert proof_of(model, subject.model["fixed"]).verdict == "proved"


def proof_of(model: ModelProto, original: ModelProto, **data: np.ndarray) -> Proof:
    said = read_derived(model)
    assert said is not None
    return prove_derived(model, said, original=original, data=data)


# -- the size -------------------------------------------------------------------------------------------------------


def perceptron(inputs: int) -> tuple[nn.Module, Tensor, ModelProto]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(inputs, 32), nn.Tanh(), nn.Linear(32, 1)).double()
    x = torch.randn(4, inputs, dtype=torch.float64)
    return module, x, _export(module, {"x": x}, ["y"], True)


# -- the proof ------------------------------------------------------------------------------------------------------

NET = """<ir_version: 10, opset_import: ["" : 18]> net (float[N, 4] x) => (float[N, 3] y)
<float[4, 3] w = {0.5, -0.2, 0.3, 0.1, 0.4, -0.6, 0.7, 0.2, -0.1, 0.3, -0.5, 0.6}> { h = MatMul(x, w) y = Tanh(h) }"""


# -- on the command line --------------------------------------------------------------------------------------------


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    onnx.save(parser.parse_model(NET), "net.onnx")
    onnx.save(parser.parse_model(NET.replace("Tanh", "Relu")), "relu.onnx")
    return Shell(tmp_path, capsys)


def test_weights_and_kept_outputs(shell: Shell) -> None:
    done = shell(
        "derive", "net.onnx", "--kind", "hessian-diagonal", "--weighted", "--per-sample", "--option", "keep-outputs",
        "--verify", "--json",
    )  # fmt: skip
    assert done.code == 0 and done.json["files"] == ["net.hessian-diagonal.onnx"], done.err
    assert list(done.json["input"]) == ["x", "y_weight"]
    assert list(done.json["output"]) == ["x_hessian_diagonal", "y"]
    assert done.json["of"].startswith("hessian-diagonal of the weighted sum of y")
    assert shell("check", "net.hessian-diagonal.onnx", "--original", "net.onnx").code == 0


def test_a_scalar_output_needs_no_weight() -> None:
    text = NET.replace("float[N, 3] y", "float y").replace("y = Tanh(h)", "t = Tanh(h) y = ReduceSum<keepdims = 0>(t)")
    model = derive(parser.parse_model(text), "laplacian")
    assert [value.name for value in model.graph.input] == ["x"]
    weighted = derive(parser.parse_model(text), "laplacian", weighted=True)
    x = np.random.default_rng(0).standard_normal((2, 4)).astype(np.float32)
    found, doubled = run(model, {"x": x}), run(weighted, {"x": x, "y_weight": np.array(2, np.float32)})
    np.testing.assert_allclose(doubled["x_laplacian"], 2 * found["x_laplacian"], rtol=1e-6)


@pytest.mark.parametrize("kind", ["vjp", "jvp", "jacobian"])
def test_weights_are_refused_for_first_derivatives(shell: Shell, kind: str) -> None:
    done = shell("derive", "net.onnx", "--kind", kind, "--weighted", "-o", "d.onnx")
    assert (done.code, done.facts) == (2, ("conflict", "weighted", f"kind='{kind}'"))
    assert not Path("d.onnx").exists()


@pytest.mark.parametrize("kind", ["hessian-diagonal", "laplacian"])
def test_second_derivatives_of_samples_by_a_weight_are_refused(kind: Derivative) -> None:
    with raises(UsageError, "wrong_shape", "0", "w"):
        derive(parser.parse_model(NET), kind, wrt="w", per_sample=True)


def test_kinks_are_reported_for_second_derivatives(shell: Shell) -> None:
    done = shell("derive", "relu.onnx", "--kind", "laplacian")
    assert done.code == 0 and "kinks" in done.err and "Relu" in done.err, done.err
    assert "kinks" not in shell("derive", "relu.onnx", "--kind", "gnvp").err
    assert "kinks" not in shell("derive", "net.onnx", "--kind", "laplacian").err


def test_an_operator_without_a_second_derivative_is_refused_by_name(shell: Shell) -> None:
    """The gradient of Tanh has a Sub, which is refused only when the gradient is differentiated."""

    def refused(op: Op, g: Val, y: Val, a: Val, b: Val) -> tuple[No, No]:
        refusal = op.no("it has no derivative in this test")
        return refusal, refusal

    with registry.scoped():
        registry.rule("Sub", override=True)(refused)
        assert shell("derive", "net.onnx", "--kind", "gnvp", "-o", "d.onnx").code == 0
        for kind in ("hessian-diagonal", "laplacian"):
            done = shell("derive", "net.onnx", "--kind", kind)
            assert (done.code, done.facts[0], done.facts[2:]) == (3, "refused", ("Sub",)), done.err
            assert not Path(f"net.{kind}.onnx").exists()
