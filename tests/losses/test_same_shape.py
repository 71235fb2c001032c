"""Every loss, reduction and option, in value and gradient, against torch.nn.functional in float64."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper

from onnxgrad_cli import losses
from onnxgrad_cli.builder import build
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.options import Options

Array = np.ndarray
WEIGHTS = [0.5, 2.0, 0.0, 1.5, 1.0]


def built(shape: tuple[int, ...], options: Options, opset: int = 18, dtype: int = TensorProto.DOUBLE) -> bytes:
    """A training model whose output is its input, with the gradient of that; batch and last axis are symbols."""
    dims = [*shape]
    if dims:
        dims[0] = "batch"
    if len(dims) > 2:
        dims[-1] = "length"
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["p"])],
        "g",
        [helper.make_tensor_value_info("x", dtype, dims)],
        [helper.make_tensor_value_info("p", dtype, dims)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    return build(model, options).model.SerializeToString()


def run(model: bytes, feeds: dict[str, Array]) -> tuple[Array, Array]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    given = {value.name for value in session.get_inputs()}
    return session.run(["loss", "x_grad"], {name: array for name, array in feeds.items() if name in given})


def value_and_gradient(name: str, x: Array, y: Array | None, opset: int = 18, **keywords: Any) -> tuple[Array, Array]:
    dtype = helper.np_dtype_to_tensor_dtype(x.dtype)
    options = Options(losses=(LossSpec(name),), grad_of_input=("x",), **keywords)
    return run(built(x.shape, options, opset, dtype), {"x": x, **({} if y is None else {"label": y})})


@dataclass(frozen=True)
class Row:
    """A loss with options, the function of PyTorch, and how prediction and label are drawn."""

    name: str
    torch: Callable[..., torch.Tensor]
    shape: tuple[int, ...] = (4, 5)
    draw: str = "normal normal"
    options: dict[str, Any] = field(default_factory=dict)
    opset: int = 18

    def __str__(self) -> str:
        options = " ".join(f"{k}={v}" for k, v in self.options.items())
        return f"{self.name} {'x'.join(map(str, self.shape))} {options} {self.opset}"

    def arrays(self) -> tuple[Array, Array | None]:
        prediction, label = self.draw.split()
        axis = -1 if label in ("token", "place") else self.options.get("class_axis", 1)
        return draw(prediction, self.shape, 0, axis), draw(label, self.shape, 1, axis)


def draw(kind: str, shape: tuple[int, ...], seed: int, axis: int = 1) -> Array | None:
    rng = np.random.default_rng(seed)
    z = np.asarray(rng.standard_normal(shape) * 2)
    if kind == "logsoftmax":
        return torch.log_softmax(torch.tensor(z), axis).numpy()
    if kind == "softmax":
        return torch.softmax(torch.tensor(z), axis).numpy()
    if kind in ("class", "ignored", "token", "place"):
        classes = rng.integers(0, shape[axis], tuple(np.delete(shape, axis)))
        if kind == "token":  # a prompt, padding, and samples of nothing else
            classes[0, :2] = classes[1, -2:] = classes[2:] = -100
        classes.flat[0] = -100 if kind == "ignored" else classes.flat[0]
        return classes
    drawn = {
        "normal": lambda: z,
        "uniform": lambda: rng.uniform(0.01, 0.99, shape),
        "binary": lambda: rng.integers(0, 2, shape) * 1.0,
        "count": lambda: rng.integers(0, 6, shape) * 1.0,
        "positive": lambda: rng.uniform(0.1, 4, shape),
        "sparse": lambda: np.maximum(rng.uniform(-0.5, 1, shape), 0),
        "none": lambda: None,
    }
    return drawn[kind]()


def row(
    name: str,
    function: Callable[..., torch.Tensor],
    draws: str,
    *shapes: tuple[int, ...],
    opset: int = 18,
    **options: Any,
):
    return [Row(name, function, shape, draws, options, opset) for shape in shapes or ((4, 5),)]


def weighted(function: Callable[..., torch.Tensor], **keywords: Any) -> Callable[..., torch.Tensor]:
    return lambda p, y, reduction: function(
        p, y, reduction=reduction, weight=torch.tensor(WEIGHTS).double(), **keywords
    )


def reduced(terms: torch.Tensor, reduction: str) -> torch.Tensor:
    return {"mean": terms.mean, "sum": terms.sum}[reduction]()


def with_options(function: Callable[..., torch.Tensor], **keywords: Any) -> Callable[..., torch.Tensor]:
    return lambda p, y, reduction: function(p, y, reduction=reduction, **keywords)


def log_by_sklearn(p: torch.Tensor, y: torch.Tensor, reduction: str) -> torch.Tensor:
    from sklearn.metrics import log_loss

    loss = F.nll_loss(torch.log(p), y, reduction=reduction)
    value = log_loss(y.numpy(), p.detach().numpy(), labels=range(p.shape[1]), normalize=reduction == "mean")
    np.testing.assert_allclose(loss.item(), value)
    return loss


def elastic(p: torch.Tensor, y: torch.Tensor, reduction: str, ratio: float = 0.5) -> torch.Tensor:
    return ratio * F.l1_loss(p, y, reduction=reduction) + (1 - ratio) * F.mse_loss(p, y, reduction=reduction)


def cosine(p: torch.Tensor, y: torch.Tensor, reduction: str, axis: int = -1) -> torch.Tensor:
    return reduced(1 - F.cosine_similarity(p, y, dim=axis), reduction)


def classes_at(axis: int, **keywords: Any) -> Callable[..., torch.Tensor]:
    return lambda p, y, reduction: F.cross_entropy(p.movedim(axis, 1), y, reduction=reduction, **keywords)


def picked_at(axis: int, log: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda p, y, reduction: F.nll_loss(log(p).movedim(axis, 1), y, reduction=reduction)


def causal_lm(p: torch.Tensor, y: torch.Tensor, reduction: str, ignore: int = -100) -> torch.Tensor:
    """As transformers' ForCausalLMLoss did it of old: logits and labels shifted against each other."""
    logits, tokens = p[:, :-1].reshape(-1, p.shape[-1]), y[:, 1:].reshape(-1)
    return F.cross_entropy(logits, tokens, ignore_index=ignore, reduction=reduction)


CLASSES = [(4, 5), (4, 5, 3), (2, 5, 3, 2)]
ANY = [(4, 5), (6,), (3, 2, 200)]

ROWS = [
    *row("mse", F.mse_loss, "normal normal", *ANY, ()),
    *row("mse", F.mse_loss, "normal normal", opset=13),
    *row("mae", F.l1_loss, "normal normal", *ANY),
    *row("huber", F.huber_loss, "normal normal", *ANY),
    *row("huber", with_options(F.huber_loss, delta=0.3), "normal normal", delta=0.3),
    *row("smooth-l1", F.smooth_l1_loss, "normal normal", *ANY),
    *row("smooth-l1", with_options(F.smooth_l1_loss, beta=0.3), "normal normal", beta=0.3),
    *row("smooth-l1", with_options(F.smooth_l1_loss, beta=0), "normal normal", beta=0),
    *row("elastic", elastic, "normal normal", *ANY),
    *row("elastic", with_options(elastic, ratio=0.9), "normal normal", l1_ratio=0.9),
    *row("bce", F.binary_cross_entropy, "uniform uniform", *ANY),
    *row("bce", F.binary_cross_entropy, "uniform binary"),
    *row("bce-logits", F.binary_cross_entropy_with_logits, "normal uniform", *ANY),
    *row("bce-logits", F.binary_cross_entropy_with_logits, "normal binary", opset=13),
    *row("bce-logits", F.binary_cross_entropy_with_logits, "normal binary", opset=20),
    *row("bce-logits", F.binary_cross_entropy_with_logits, "normal binary", opset=22),
    *row(
        "bce-logits",
        with_options(F.binary_cross_entropy_with_logits, pos_weight=torch.tensor(WEIGHTS).double()),
        "normal binary",
        pos_weight=WEIGHTS,
    ),
    *row(
        "bce-logits",
        with_options(F.binary_cross_entropy_with_logits, pos_weight=torch.tensor(3.0).double()),
        "normal binary",
        pos_weight=3,
    ),
    *row("kl-div", F.kl_div, "logsoftmax softmax", *CLASSES),
    *row("kl-div", F.kl_div, "logsoftmax sparse"),
    *row("kl-div", with_options(F.kl_div, log_target=True), "logsoftmax logsoftmax", log_target=True),
    *row(
        "kl-div",
        lambda p, y, reduction: F.kl_div(p, y, reduction="batchmean" if reduction == "mean" else "sum"),
        "logsoftmax softmax",
        (4, 5),
        (4, 5, 3),
        batchmean=True,
    ),
    *row("poisson-nll", F.poisson_nll_loss, "normal count", *ANY),
    *row("poisson-nll", with_options(F.poisson_nll_loss, full=True), "normal count", full=True),
    *row("poisson-nll", with_options(F.poisson_nll_loss, log_input=False), "positive count", log_input=False),
    *row(
        "poisson-nll",
        with_options(F.poisson_nll_loss, log_input=False, eps=0.1),
        "positive count",
        log_input=False,
        eps=0.1,
    ),
    *row("cosine", cosine, "normal normal", (4, 5), (2, 3, 5)),
    *row("cosine", with_options(cosine, axis=1), "normal normal", (2, 3, 5), axis=1),
    *row("identity", lambda p, y, reduction: reduced(p, reduction), "normal none", *ANY, ()),
    *row("soft-cross-entropy", F.cross_entropy, "normal softmax", *CLASSES),
    *row(
        "soft-cross-entropy",
        weighted(F.cross_entropy, label_smoothing=0.2),
        "normal softmax",
        *CLASSES,
        class_weights=WEIGHTS,
        label_smoothing=0.2,
    ),
    *row(
        "soft-cross-entropy",
        lambda p, y, reduction: F.cross_entropy(p.movedim(-1, 1), y.movedim(-1, 1), reduction=reduction),
        "normal softmax",
        (2, 3, 5),
        axis=-1,
    ),
    *row("cross-entropy", F.cross_entropy, "normal class", *CLASSES),
    *row("cross-entropy", F.cross_entropy, "normal ignored", *CLASSES),
    *row("cross-entropy", F.cross_entropy, "normal ignored", opset=13),
    *row("cross-entropy", with_options(F.cross_entropy, ignore_index=2), "normal class", ignore_index=2),
    *row(
        "cross-entropy",
        with_options(F.cross_entropy, label_smoothing=0.1),
        "normal ignored",
        *CLASSES,
        label_smoothing=0.1,
    ),
    *row("cross-entropy", weighted(F.cross_entropy), "normal ignored", *CLASSES, class_weights=WEIGHTS),
    *row(
        "cross-entropy",
        weighted(F.cross_entropy, label_smoothing=0.2, ignore_index=1),
        "normal class",
        *CLASSES,
        class_weights=WEIGHTS,
        label_smoothing=0.2,
        ignore_index=1,
    ),
    *row("cross-entropy", classes_at(-1), "normal ignored", (4, 5), (2, 3, 5), (2, 3, 4, 5), class_axis=-1),
    *row("cross-entropy", classes_at(3), "normal ignored", (2, 3, 4, 5), opset=13, class_axis=3),
    *row("cross-entropy", classes_at(2), "normal ignored", (2, 3, 5, 4), class_axis=2),
    *row(
        "cross-entropy",
        classes_at(-1, weight=torch.tensor(WEIGHTS).double(), label_smoothing=0.2, ignore_index=1),
        "normal class",
        (2, 3, 5),
        class_axis=-1,
        class_weights=WEIGHTS,
        label_smoothing=0.2,
        ignore_index=1,
    ),
    *row("causal-lm", causal_lm, "normal token", (4, 5, 7), (2, 2, 3), (3, 6, 300)),
    *row("causal-lm", causal_lm, "normal token", (2, 4, 5), opset=13),
    *row("causal-lm", with_options(causal_lm, ignore=1), "normal place", (2, 9, 4), ignore_index=1),
    *row("nll", picked_at(-1, lambda p: p), "logsoftmax ignored", (2, 3, 5), class_axis=-1),
    *row("log", picked_at(-1, torch.log), "softmax ignored", (2, 3, 5), class_axis=-1),
    *row("nll", F.nll_loss, "logsoftmax ignored", *CLASSES),
    *row("nll", weighted(F.nll_loss), "logsoftmax ignored", class_weights=WEIGHTS),
    *row("log", log_by_sklearn, "softmax class"),
    *row("log", lambda p, y, reduction: F.nll_loss(p.log(), y, reduction=reduction), "softmax ignored", (2, 5, 3)),
]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("case", ROWS, ids=str)
@pytest.mark.thinned(4)
def test_like_pytorch(case: Row, reduction: str) -> None:
    x, y = case.arrays()
    value, gradient = value_and_gradient(case.name, x, y, case.opset, reduction=reduction, loss_options=case.options)
    p = torch.tensor(x, requires_grad=True)
    expected = case.torch(p, None if y is None else torch.tensor(y), reduction=reduction)
    (slope,) = torch.autograd.grad(expected, p)
    assert value.shape == ()
    np.testing.assert_allclose(value, expected.item(), rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(gradient, slope.numpy(), rtol=1e-11, atol=1e-13)


def test_every_loss_has_a_row() -> None:
    every = {(loss.name, option.name) for loss in losses.LOSSES for option in loss.options}
    names = {loss.name for loss in losses.LOSSES}
    assert names == {row.name for row in ROWS}
    tested = {(row.name, option) for row in ROWS for option in row.options}
    pooled = {("nll", "ignore_index"), ("log", "class_weights"), ("log", "ignore_index"), ("cosine", "eps")}
    assert every - tested == pooled


SAMPLES = [
    ("mse", "normal normal", (4, 5)),
    ("huber", "normal normal", (4, 2, 3)),
    ("cross-entropy", "normal class", (4, 5, 2)),
]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("name", "draws", "shape"), SAMPLES)
def test_sample_weight_multiplies_each_sample(name: str, draws: str, shape: tuple[int, ...], reduction: str) -> None:
    function = {"mse": F.mse_loss, "huber": F.huber_loss, "cross-entropy": F.cross_entropy}[name]
    x, y = Row(name, function, shape, draws).arrays()
    share = np.array([0.0, 1.0, 2.5, 0.5])
    options = Options(losses=(LossSpec(name),), grad_of_input=("x",), sample_weight="share", reduction=reduction)
    value, gradient = run(built(shape, options), {"x": x, "label": y, "share": share})
    p = torch.tensor(x, requires_grad=True)
    terms = function(p, torch.tensor(y), reduction="none")
    expected = reduced(terms * torch.tensor(share).reshape(-1, *[1] * (terms.ndim - 1)), reduction)
    np.testing.assert_allclose(value, expected.item(), rtol=1e-12)
    np.testing.assert_allclose(gradient, torch.autograd.grad(expected, p)[0].numpy(), rtol=1e-11)


BIG = [-100.0, -30.0, -1e-3, -0.0, 0.0, 1e-3, 30.0, 100.0]

STABLE = [
    *(
        (name, F.binary_cross_entropy_with_logits, BIG, [label] * 8)
        for name in ["bce-logits"]
        for label in (0.0, 1.0, 0.3)
    ),
    ("cross-entropy", F.cross_entropy, np.diag([100.0, -100.0, 0.0]), np.array([1, 1, 2])),
    ("cross-entropy", F.cross_entropy, [[100.0, -100.0], [-100.0, 100.0], [100.0, 100.0]], np.array([0, 0, 1])),
    ("cross-entropy", F.cross_entropy, [[1e4, -np.inf], [3e38, -3e38]], np.array([0, 0])),
    ("huber", F.huber_loss, [1e30, -1e30, 1e-30], [0.0, 0.0, 0.0]),
    ("smooth-l1", F.smooth_l1_loss, [1e30, -1e30, 1e-30], [0.0, 0.0, 0.0]),
    ("mae", F.l1_loss, [1.0, -100.0], [1.0, 100.0]),
    ("poisson-nll", F.poisson_nll_loss, [-100.0, 0.0, 30.0], [0.0, 1.0, 2.0]),
    ("kl-div", F.kl_div, [[-100.0, -1e-6]], [[0.0, 1.0]]),
    ("cosine", cosine, [[0.0, 0.0], [1e-15, 0.0], [1e15, 1e15]], [[1.0, 0.0], [1.0, 1.0], [1.0, 0.0]]),
]


@pytest.mark.parametrize(("name", "function", "x", "y"), STABLE, ids=lambda v: v if isinstance(v, str) else "")
def test_stable_in_float32(name: str, function: Callable[..., torch.Tensor], x: Any, y: Any) -> None:
    x = np.asarray(x, np.float32)
    y = np.asarray(y) if np.asarray(y).dtype.kind == "i" else np.asarray(y, np.float32)
    value, gradient = value_and_gradient(name, x, y, reduction="sum")
    p = torch.tensor(x.astype(np.float64), requires_grad=True)
    target = torch.tensor(y if y.dtype.kind == "i" else y.astype(np.float64))
    expected = function(p, target, reduction="sum")
    np.testing.assert_allclose(value, expected.item(), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(gradient, torch.autograd.grad(expected, p)[0].numpy(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["bce", "log"])
def test_probabilities_of_0_and_1_stay_finite(name: str) -> None:
    x = np.array([[0.0, 1.0]], np.float32)
    y = np.array([0]) if name == "log" else np.array([[1.0, 0.0]], np.float32)
    value, gradient = value_and_gradient(name, x, y, reduction="sum")
    count = 1 if name == "log" else 2
    np.testing.assert_allclose(value, -count * np.log(2.0**-126), rtol=1e-6)
    np.testing.assert_array_equal(gradient, [[0.0, 0.0]])


def test_a_sure_and_right_probability_costs_nothing() -> None:
    x, y = np.array([[0.0, 1.0]], np.float32), np.array([[0.0, 1.0]], np.float32)
    value, gradient = value_and_gradient("bce", x, y, reduction="sum")
    assert value == 0
    np.testing.assert_array_equal(gradient, [[1.0, -1.0]])


@pytest.mark.parametrize("name", ["mse", "cross-entropy", "bce-logits", "cosine"])
def test_float16_is_judged_in_float32(name: str) -> None:
    """The sum of 70,000 ones, and their count, overflow in float16."""
    x = np.ones((7, 10_000), np.float16)
    y = np.arange(7) if name == "cross-entropy" else np.zeros_like(x)
    value, gradient = value_and_gradient(name, x, y, reduction="sum")
    assert value.dtype == np.float32 and gradient.dtype == np.float16
    expected = {"mse": 70_000, "cross-entropy": 7 * np.log(10_000), "bce-logits": 70_000 * np.log1p(np.e), "cosine": 7}
    np.testing.assert_allclose(value, expected[name], rtol=5e-5)


def test_a_mean_of_millions_does_not_drift() -> None:
    rng = np.random.default_rng(0)
    x = rng.random((128, 100_000), np.float32) * 3
    for name in ("identity", "mse"):
        value, _ = value_and_gradient(name, x, None if name == "identity" else np.zeros_like(x))
        exact = np.mean(x.astype(np.float64) ** (1 if name == "identity" else 2))
        np.testing.assert_allclose(value, exact, rtol=1e-6)
