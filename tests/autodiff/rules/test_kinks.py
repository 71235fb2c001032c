"""Kinks and special values: without a derivative, or where a formula would give nan, we follow PyTorch.

Each row is a one-node model at chosen points, compared element by element with torch.autograd in float64.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from onnxgrad_cli.autodiff import registry
from onnxgrad_cli.execution.executor import Executor
from tests.harness import Case, const, forward_model, sample, wanted_inputs, with_gradient

INF, NAN = np.inf, np.nan


@dataclass(frozen=True)
class Kink:
    """A case at chosen points, and the same function in PyTorch."""

    case: Case
    torch: Callable[..., torch.Tensor]

    def __str__(self) -> str:
        return str(self.case)


def kink(op: str, function: Callable[..., torch.Tensor], *inputs, note: str = "", **attrs) -> Kink:
    arrays = [np.asarray(x, float) if isinstance(x, (list, float)) else x for x in inputs]
    return Kink(Case(op, arrays, attrs, note=note), function)


AROUND_0 = [-1.5, -0.0, 0.0, 1.5, INF, -INF]
BASES = np.repeat([-2.0, -1.0, -0.0, 0.0, 0.5, 1.0, INF, 1e-310], 9)
EXPONENTS = np.tile([-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0], 8)
FINITE = [-1.5, -0.5, -0.0, 0.0, 0.5, 1.5]
STEPS = [-1.5, -1.0, -0.5, -0.0, 0.0, 0.5, 1.0, 2.5]
PLATEAUS = [[2.0, 2.0, -1.0, 2.0, -1.0], [0.0, 0.0, 0.0, 0.0, 0.0], [-3.0, 0.0, 0.0, -3.0, 1.0]]
TIES = [[-1.0, 0.0, 2.0, 2.0, INF, -INF], [0.0, 0.0, 2.0, -2.0, INF, 1.0]]


def fixed_power(exponent: float) -> Kink:
    return kink(
        "Pow",
        lambda x, p: x ** float(p),
        [-2.0, 0.0, 0.5, 1.0, 1e-300],
        const(exponent, np.float64),
        note=f"exponent {exponent}",
    )


def clip(points, low, high, note="") -> Kink:
    return kink("Clip", lambda x, *b: torch.clamp(x, *b) if b else x.clone(), points, low, high, note=note)


def clip_one(points, low, high) -> Kink:
    function = (lambda x, b: torch.clamp(x, max=b)) if low is None else (lambda x, b: torch.clamp(x, min=b))
    return kink("Clip", function, points, low, high)


KINKS = [
    kink("Abs", torch.abs, AROUND_0),
    kink("Sqrt", torch.sqrt, [0.0, 4.0, -1.0, INF]),
    kink("Reciprocal", torch.reciprocal, [0.0, 4.0, INF]),
    kink("Log", torch.log, [0.0, 1.0, INF]),
    kink("Exp", torch.exp, AROUND_0),
    kink("Div", torch.div, [1.0, 0.0, -2.0, 0.0, INF], [0.0, 2.0, INF, 0.0, 1.0]),
    kink("Pow", torch.pow, BASES, EXPONENTS, note="every sign of base and exponent"),
    kink("Pow", torch.pow, BASES, [0.0], note="exponent 0 at run time"),
    *(fixed_power(p) for p in (-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0)),
    kink("Max", torch.maximum, *TIES),
    kink("Min", torch.minimum, *TIES),
    kink("Max", lambda *xs: torch.stack(xs).amax(0), *TIES, [[2.0] * 6][0], note="three, ties split evenly"),
    kink("Min", lambda *xs: torch.stack(xs).amin(0), *TIES, [[0.0] * 6][0], note="three, ties split evenly"),
    clip([-2.0, -1.0, 0.0, 1.0, 2.0, INF, NAN], const(-1, np.float64), const(1, np.float64), "at the bounds"),
    clip([-2.0, -1.0, 0.0, 1.0, 2.0, INF, -INF], np.array(-1.0), np.array(1.0), "gradients of the bounds"),
    clip([-2.0, -1.0, 0.0, 1.0, 2.0], np.array(1.0), np.array(-1.0), "bounds crossed"),
    clip([-2.0, -1.0, 0.0, 1.0, 2.0], const(1, np.float64), const(-1, np.float64), "constant bounds crossed"),
    clip([-2.0, 1.0, 2.0], np.array(1.0), np.array(1.0), "equal bounds"),
    clip_one([-2.0, 1.0, 2.0], np.array(1.0), None),
    clip_one([-2.0, 1.0, 2.0], None, np.array(1.0)),
    kink("Mod", torch.fmod, [4.0, -4.0, 5.5, 0.0], [2.0, 2.0, -2.0, 3.0], fmod=1),
    kink("Asin", torch.asin, [-1.0, 0.0, 1.0]),
    kink("Acos", torch.acos, [-1.0, 0.0, 1.0]),
    kink("Acosh", torch.acosh, [1.0, 1 + 1e-12, 1e100]),
    kink("Asinh", torch.asinh, [-1e100, 0.0, 1e100]),
    kink("Atanh", torch.atanh, [-1.0, 0.0, 1.0]),
    kink("Atan", torch.atan, [-1e200, 0.0, INF]),
    kink("Relu", torch.relu, FINITE),
    kink("LeakyRelu", lambda x: functional.leaky_relu(x, 0.25), FINITE, alpha=0.25),
    kink("PRelu", functional.prelu, FINITE, [0.25]),
    kink("Elu", lambda x: functional.elu(x, 2.0), FINITE, alpha=2.0),
    kink("Selu", lambda x: 2.0 * functional.elu(x, 0.5), FINITE, alpha=0.5, gamma=2.0),
    kink("ThresholdedRelu", lambda x: functional.threshold(x, 1.5, 0.0), FINITE, alpha=1.5),
    kink("Shrink", lambda x: functional.hardshrink(x, 1.5), FINITE, lambd=1.5),
    kink("Shrink", lambda x: functional.softshrink(x, 1.5), FINITE, lambd=1.5, bias=1.5),
    kink("HardSigmoid", functional.hardsigmoid, [-3.5, -3.0, 0.0, 3.0, 3.5], alpha=1 / 6, beta=0.5),
    kink("HardSwish", functional.hardswish, [-3.5, -3.0, 0.0, 3.0, 3.5]),
    kink("Softsign", functional.softsign, FINITE),
    # steps
    *(kink(op, getattr(torch, op.lower()), STEPS) for op in ("Sign", "Floor", "Ceil", "Round")),
    # ties along an axis
    *(
        kink(f"Reduce{op}", lambda x, _, f=f: f(x, 1), PLATEAUS, const([1]), keepdims=0)
        for op, f in (
            ("Max", torch.amax),
            ("Min", torch.amin),
            ("L1", lambda x, axis: torch.linalg.vector_norm(x, 1, axis)),
            ("L2", lambda x, axis: torch.linalg.vector_norm(x, 2, axis)),
            ("Prod", torch.prod),
        )
    ),
    kink("MaxPool", lambda x: functional.max_pool1d(x, 3, 1), [PLATEAUS], kernel_shape=[3]),
    kink("GlobalMaxPool", lambda x: functional.adaptive_max_pool1d(x, 1), [PLATEAUS]),
    kink("LpPool", lambda x: functional.lp_pool1d(x, 2, 2, 1), [[[0.0, 0.0, 0.0, 3.0, 4.0]]], kernel_shape=[2], p=2),
]

ELSEWHERE = {
    "Binarizer": "../definitions/test_classical.py",
    "DeformConv": "test_interpolation.py",
    "DynamicQuantizeLinear": "test_quantize.py",
    "GRU": "test_recurrent.py",
    "GlobalLpPool": "test_pool.py",
    "GridSample": "test_interpolation.py",
    "Hardmax": "../../passes/prepare/test_upgrade.py",
    "LSTM": "test_recurrent.py",
    "LabelEncoder": "../../jobs/test_contrib_operators.py",
    "LpNormalization": "test_norm.py",
    "MaxRoiPool": "test_interpolation.py",
    "MeanVarianceNormalization": "test_norm.py",
    "OneHotEncoder": "../../jobs/test_contrib_operators.py",
    "QuantizeLinear": "test_quantize.py",
    "RNN": "test_recurrent.py",
    "RoiAlign": "test_interpolation.py",
    "ScatterElements": "test_index.py",
    "ScatterND": "test_index.py",
    "TopK": "test_index.py",
    "Unique": "test_index.py",
}
"""Operators with several inputs or outputs, whose kinks are tested with the rest of them."""


def test_every_convention_is_compared() -> None:
    stated = {rule.op_type for rule in registry.all_rules() if rule.kink}
    here = {row.case.op for row in KINKS}
    assert not stated - here - set(ELSEWHERE)
    assert not set(ELSEWHERE) - stated
    files = {file: (Path(__file__).parent / file).read_text() for file in ELSEWHERE.values()}
    assert all(op.lower() in files[file].lower().replace("_", "") for op, file in ELSEWHERE.items())


@pytest.mark.parametrize("row", KINKS, ids=str)
def test_like_pytorch(row: Kink) -> None:
    case, feeds, names = row.case, sample(row.case), wanted_inputs(row.case)
    tensors = {name: torch.tensor(feeds[name], requires_grad=name in names) for name in feeds}
    expected = row.torch(*tensors.values())
    seed = torch.linspace(0.5, 1.5, expected.numel(), dtype=torch.float64).reshape(expected.shape)
    gradients = torch.autograd.grad(expected, [tensors[name] for name in names], seed)
    model = with_gradient(forward_model(case, symbolic=False), names, ["y0"], "g_")
    given = {value.name for value in model.graph.input}
    found = Executor(model)({name: x for name, x in {**feeds, "g_y0": seed.numpy()}.items() if name in given})
    for name, gradient in zip(names, gradients, strict=True):
        np.testing.assert_allclose(found[f"g_grad_{name}"], gradient.numpy(), rtol=1e-9, atol=1e-300)
