"""Fourier transforms against PyTorch's autograd in float64, and at real size in float32 on onnxruntime."""

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper

from onnxgrad_cli.errors import UnsupportedError
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.type_inference import infer_types
from onnxgrad_cli.ir.types import shape_of
from onnxgrad_cli.passes.prepare.normalise import normalise
from tests.harness import Case, const, fed, forward_model, sample, with_gradient

rng = np.random.default_rng(3)


def gradients(case: Case, seed: np.ndarray, symbolic: bool = False, order: int = 1) -> dict[str, np.ndarray]:
    """The gradients of seed . y; of order 2, those of the squared norm of the first."""
    model, feeds = forward_model(case, symbolic), sample(case)
    names = [name for name in fed(model, feeds) if feeds[name].dtype.kind == "f"]
    model, prefix = with_gradient(model, names, ["y0"], "g_"), "g_"
    feeds["g_y0"] = seed
    if order == 2:
        first = Executor(model, case.executor)(fed(model, feeds))
        seeded = [f"g_grad_{name}" for name in names]
        feeds |= {f"h_{name}": 2 * first[name] for name in seeded}
        model, prefix = with_gradient(model, names, seeded, "h_"), "h_"
    found = Executor(model, case.executor)(fed(model, feeds))
    return {name: found[f"{prefix}grad_{name}"] for name in names}


def agree(case: Case, function, symbolic: bool = False, order: int = 1, tolerance: float = 1e-7) -> None:
    """`function(*leaves)` is PyTorch's form of the case; in float64 onnxruntime's inverse is good to 1e-8."""
    leaves = {n: torch.tensor(x, requires_grad=True) for n, x in sample(case).items() if x.dtype.kind == "f"}
    y = function(*leaves.values())
    seed = rng.standard_normal(y.shape)
    expected = torch.autograd.grad(y, list(leaves.values()), torch.tensor(seed), create_graph=True)
    if order == 2:
        norm = sum((e * e).sum() for e in expected)
        expected = torch.autograd.grad(norm, list(leaves.values()), allow_unused=True)
    found = gradients(case, seed.astype(np.float64), symbolic, order)
    for name, wanted in zip(leaves, expected, strict=True):
        wanted = torch.zeros_like(leaves[name]) if wanted is None else wanted
        scale = max(float(wanted.abs().max()), 1.0)
        np.testing.assert_allclose(found[name], wanted.detach().numpy(), rtol=0, atol=tolerance * scale)


def complex_(x: torch.Tensor) -> torch.Tensor:
    return x[..., 0] if x.shape[-1] == 1 else torch.view_as_complex(x)


def transform(name: str, axis: int, length: int | None):
    def function(x: torch.Tensor) -> torch.Tensor:
        z = getattr(torch.fft, name)(complex_(x), n=length, dim=axis)
        return torch.view_as_real(z.resolve_conj()) if z.is_complex() else z[..., None]

    return function


KINDS = [
    ("fft", 1, {}),
    ("fft", 2, {}),
    ("ifft", 1, {"inverse": 1}),
    ("ifft", 2, {"inverse": 1}),
    ("rfft", 1, {"onesided": 1}),
    ("irfft", 2, {"inverse": 1, "onesided": 1}),
]


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("opset", [17, 20])
@pytest.mark.parametrize("length", [None, 4, 6, 9])
@pytest.mark.parametrize(("name", "parts", "attrs"), KINDS)
@pytest.mark.thinned(4)
def test_transforms_against_pytorch(name, parts, attrs, length, opset, symbolic) -> None:
    if name == "irfft" and length is not None:
        if symbolic:
            pytest.skip("refused: whether the bins fit the length is known only at run time")
        bins = length // 2 + 1
    else:
        bins = 6
    inputs = [(2, bins, 3, parts), const(length) if length else None]
    case = Case(
        "DFT", [*inputs, const(1)] if opset >= 20 else inputs, attrs | ({} if opset >= 20 else {"axis": 1}), 1, opset
    )
    agree(case, transform(name, 1, length), symbolic)


@pytest.mark.parametrize(("bins", "length"), [(6, 8), (3, 8), (4, 5)])
def test_an_inverse_one_sided_transform_that_onnxruntime_gets_wrong_is_refused(bins: int, length: int) -> None:
    case = Case("DFT", [(2, bins, 2), const(length), const(1)], {"inverse": 1, "onesided": 1}, opset=20)
    with pytest.raises(UnsupportedError, match="bins"):
        gradients(case, np.ones((2, length, 1)))


WINDOWS = [(16, 4, 8), (17, 3, 5), (15, 8, 8), (20, 7, 4), (8, 1, 8)]


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("onesided", [0, 1])
@pytest.mark.parametrize(("length", "step", "width"), WINDOWS)
@pytest.mark.thinned(3)
def test_stft_against_pytorch(length: int, step: int, width: int, onesided: int, order: int) -> None:
    def function(x: torch.Tensor, window: torch.Tensor) -> torch.Tensor:
        frames = torch.stft(
            x[..., 0], width, step, width, window, center=False, onesided=bool(onesided), return_complex=True
        )
        return torch.view_as_real(frames.transpose(1, 2).contiguous())

    case = Case("STFT", [(2, length, 1), const(step), (width,), None], {"onesided": onesided}, opset=17)
    for symbolic in (False, True):
        agree(case, function, symbolic, order, 1e-10)


def test_stft_of_a_complex_signal_against_pytorch() -> None:
    def function(x: torch.Tensor, window: torch.Tensor) -> torch.Tensor:
        frames = torch.stft(
            torch.view_as_complex(x), 6, 2, 6, window, center=False, onesided=False, return_complex=True
        )
        return torch.view_as_real(frames.transpose(1, 2).contiguous())

    case = Case("STFT", [(2, 14, 2), const(2), (6,), None], {"onesided": 0}, opset=17)
    for symbolic in (False, True):
        agree(case, function, symbolic, tolerance=1e-10)


def test_stft_at_real_size_in_float32() -> None:
    x, window = rng.standard_normal((2, 16000, 1)), np.hanning(400)
    wide = torch.tensor(x, requires_grad=True), torch.tensor(window, requires_grad=True)
    frames = torch.stft(wide[0][..., 0], 400, 160, 400, wide[1], center=False, return_complex=True)
    y = torch.view_as_real(frames.transpose(1, 2).contiguous())
    seed = rng.standard_normal(y.shape)
    expected = torch.autograd.grad(y, wide, torch.tensor(seed))
    inputs = [x.astype(np.float32), const(160), window.astype(np.float32), None]
    found = gradients(Case("STFT", inputs, {"onesided": 1}, opset=17), seed.astype(np.float32))
    for name, wanted in zip(("x0", "x2"), expected, strict=True):
        assert found[name].dtype == np.float32
        scale = float(wanted.abs().max())
        np.testing.assert_allclose(found[name], wanted.numpy(), rtol=0, atol=3e-6 * scale)


def test_the_default_of_stft_is_known_to_the_inference_of_shapes() -> None:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 16, 1])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * 4)
    constants = [helper.make_tensor(n, TensorProto.INT64, [], [v]) for n, v in (("step", 4), ("length", 8))]
    node = helper.make_node("STFT", ["x", "step", "", "length"], ["y"])
    graph = Graph(helper.make_model(helper.make_graph([node], "stft", [x], [y], constants)))
    normalise(graph)
    infer_types(graph)
    assert shape_of(graph.types["y"]) == (1, 3, 5, 2)
