"""Margin and DLR attacks against PyTorch, on logits, probabilities and saturated scores, by the command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper, parser

from onnxgrad_cli.jobs.attack import Fooled
from tests.cli_harness import Result, Shell
from tests.explanations import nets

X = nets.samples(24)
EPSILON, STEPS, SIZE = 0.1, 7, 0.03
Model = Callable[[torch.Tensor], torch.Tensor]


def saved(path: str, scale: float = 1, tail: str = "y = Identity(logits)", opset: int = 18, batch: str = "N") -> None:
    """Save the network with its logits times `scale`, and operators behind them."""
    text = nets.TEXT.replace("float[N, 5] logits", "float[N, 5] y").replace(", b3)", f", b3) {tail}")
    model = parser.parse_model(text.replace('"" : 18', f'"" : {opset}').replace("float[N,", f"float[{batch},"))
    for name, array in nets.weights().items():
        scaled = array * np.float32(scale) if name in ("w3", "b3") else array
        model.graph.initializer.append(numpy_helper.from_array(scaled, name))
    model.graph.initializer.append(numpy_helper.from_array(np.float32(0.5), "half"))
    onnx.save(model, path)


@pytest.fixture
def attack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Result]:
    """Run the command on the samples, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    np.savez("data.npz", x=X)
    shell = Shell(tmp_path, capsys)

    def run(model: str, *words: object, method: str = "pgd") -> Result:
        given = ("--data", "data.npz", "--method", method, "--clip", "0,1", "--json", "-o", "fooled.npz")
        return shell("attack", model, *given, *words)

    return run


def cross_entropy(z: torch.Tensor, label: torch.Tensor, target: int | None) -> torch.Tensor:
    aim = label if target is None else torch.full_like(label, target)
    loss = torch.nn.functional.cross_entropy(z, aim, reduction="sum")
    return loss if target is None else -loss


def margin(z: torch.Tensor, label: torch.Tensor, target: int | None) -> torch.Tensor:
    """Carlini and Wagner's f6, without the lower bound."""
    aim = label if target is None else torch.full_like(label, target)
    one = torch.nn.functional.one_hot(aim, z.shape[1]).bool()
    other = z.masked_fill(one, -torch.inf).amax(1)
    lead = z[one] - other
    return (-lead if target is None else lead).sum()


def dlr(z: torch.Tensor, label: torch.Tensor, target: int | None) -> torch.Tensor:
    """The formulas of AutoAttack."""
    ordered, places = z.sort(1)
    rows = torch.arange(len(z))
    if target is not None:
        span = ordered[:, -1] - 0.5 * (ordered[:, -3] + ordered[:, -4]) + 1e-12
        return (-(z[rows, label] - z[:, target]) / span).sum()
    found = (places[:, -1] == label).float()
    other = ordered[:, -2] * found + ordered[:, -1] * (1 - found)
    return (-(z[rows, label] - other) / (ordered[:, -1] - ordered[:, -3] + 1e-12)).sum()


LOSSES = {"cross-entropy": cross_entropy, "margin": margin, "dlr": dlr}


def by_pytorch(model: Model, loss: str, target: int | None = None, norm: str = "inf") -> torch.Tensor:
    """PGD that begins at the samples, whose labels are the model's answers."""
    x = moved = torch.tensor(X)
    label = model(x).argmax(1).detach()
    for _ in range(STEPS):
        moved = moved.detach().requires_grad_()
        (up,) = torch.autograd.grad(LOSSES[loss](model(moved), label, target), moved)
        if norm == "inf":
            change = (moved.detach() + SIZE * up.sign() - x).clamp(-EPSILON, EPSILON)
        else:
            change = moved.detach() + SIZE * up / up.flatten(1).norm(dim=1)[:, None, None, None] - x
            change = change * (EPSILON / change.flatten(1).norm(dim=1)).clamp(max=1)[:, None, None, None]
        moved = (x + change).clamp(0, 1)
    return moved


def success(model: Model, moved: torch.Tensor) -> float:
    return float((model(moved).argmax(1) != model(torch.tensor(X)).argmax(1)).float().mean())


def scaled(scale: float) -> Model:
    twin = nets.Twin()
    twin.head.weight.data *= scale
    twin.head.bias.data *= scale
    return twin


SAME = ("--no-start", "--epsilon", EPSILON, "--steps", STEPS, "--step-size", SIZE)


@pytest.mark.parametrize("loss", ["margin", "dlr"])
@pytest.mark.parametrize("target", [None, 2])
@pytest.mark.parametrize("norm", ["inf", "2"])
@pytest.mark.thinned(4)
def test_the_samples_are_those_of_pytorch(
    attack: Callable[..., Result], loss: str, target: int | None, norm: str
) -> None:
    saved("net.onnx", 2)
    words = () if target is None else ("--targeted", target)
    result = attack("net.onnx", *SAME, "--loss", loss, "--norm", norm, "--verify", *words)
    assert result.code == 0, result.err
    assert result.json["loss"] == loss and result.json["proof"]["verdict"] == "proved"
    expected = by_pytorch(scaled(2), loss, target, norm)
    np.testing.assert_allclose(np.load("fooled.npz")["x"], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tail", ["y = Identity(logits)", "y = Softmax(logits)", "p = Softmax(logits) y = Log(p)"])
@pytest.mark.thinned(3)
def test_cross_entropy_fails_on_saturated_scores_and_the_loss_that_is_named_succeeds(
    attack: Callable[..., Result], tail: str
) -> None:
    saved("net.onnx", 3e3, tail)
    model = scaled(3e3)
    result = attack("net.onnx", *SAME)
    theirs = success(model, by_pytorch(model, "cross-entropy"))
    assert result.code == 0 and result.json["success"] == pytest.approx(theirs) and theirs < 0.2
    assert result.json["vanishing"] > 0.8 * len(X)
    assert "so much" in result.err and "attack with --loss margin\n" in result.err
    for loss in ("margin", "dlr"):
        result = attack("net.onnx", *SAME, "--loss", loss)
        theirs = success(model, by_pytorch(model, loss))
        assert result.code == 0 and result.json["success"] == pytest.approx(theirs) and theirs > 0.8
        assert result.json["vanishing"] == 0 and "caution" not in result.err


@pytest.mark.parametrize("loss", list(LOSSES))
def test_the_logarithms_of_probabilities_are_logits(attack: Callable[..., Result], loss: str) -> None:
    """No Softmax stands at the end of an ensemble."""
    mean = "p = Softmax(logits) o = Mul(logits, half) q = Softmax(o) s = Add(p, q) y = Mul(s, half)"
    saved("net.onnx", 5, mean)
    twin = scaled(5)

    def log_mean(x: torch.Tensor) -> torch.Tensor:
        z = twin(x)
        return ((z.softmax(1) + (z / 2).softmax(1)) / 2).log()

    result = attack("net.onnx", *SAME, "--loss", loss)
    assert result.code == 0 and "note: 'y' " in result.err
    np.testing.assert_allclose(np.load("fooled.npz")["x"], by_pytorch(log_mean, loss), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("opset", "batch"), [(8, "N"), (18, "7")])
@pytest.mark.parametrize("loss", ["margin", "dlr"])
def test_models_of_an_old_opset_or_a_fixed_batch(
    attack: Callable[..., Result], opset: int, batch: str, loss: str
) -> None:
    saved("net.onnx", 2, opset=opset, batch=batch)
    result = attack("net.onnx", *SAME, "--loss", loss)
    assert result.code == 0, result.err
    np.testing.assert_allclose(np.load("fooled.npz")["x"], by_pytorch(scaled(2), loss), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_restarts_never_lower_the_success(attack: Callable[..., Result]) -> None:
    saved("net.onnx", 3e3)
    before = np.zeros(len(X), bool)
    rates = []
    for restarts in (1, 2, 6):
        words = ("--epsilon", 0.03, "--steps", 1, "--step-size", 0.01, "--loss", "margin", "--restarts", restarts)
        result = attack("net.onnx", *words)
        assert result.code == 0, result.err
        with np.load("fooled.npz") as found:
            now, x = found["before"] != found["after"], found["x"]
        assert (now >= before).all() and result.json["success"] == pytest.approx(now.mean())
        assert np.abs(x - X).max() <= 0.03 + 1e-6
        again = attack("net.onnx", *words)
        assert again.json == result.json and np.array_equal(np.load("fooled.npz")["x"], x)
        before = now
        rates.append(now.mean())
    assert rates[0] < rates[-1] < 1


def test_restarts_keep_the_highest_loss(attack: Callable[..., Result]) -> None:
    """No sample succeeds within so small a distance."""
    saved("net.onnx", 2)
    losses = []
    for restarts in (1, 4):
        result = attack("net.onnx", "--epsilon", 1e-3, "--steps", 1, "--step-size", 1e-4, "--restarts", restarts)
        z = scaled(2)(torch.tensor(np.load("fooled.npz")["x"]))
        label = torch.tensor(np.load("fooled.npz")["before"])
        assert result.json["success"] == 0
        losses.append(torch.nn.functional.cross_entropy(z, label, reduction="none").detach().numpy())
    assert (losses[1] >= losses[0] - 1e-6).all() and (losses[1] > losses[0] + 1e-5).mean() > 0.5


@pytest.mark.parametrize("loss", ["margin", "dlr"])
def test_logits_in_half_precision(attack: Callable[..., Result], loss: str) -> None:
    saved("net.onnx", 2, "h = Cast<to = 10>(logits) n = Neg(h) m = Neg(n) y = Cast<to = 1>(m)")
    result = attack("net.onnx", *SAME, "--loss", loss, "--output", "m")
    assert result.code == 0, result.err
    theirs = success(scaled(2), by_pytorch(scaled(2), loss))
    assert result.json["success"] == pytest.approx(theirs, abs=0.05)


@pytest.mark.parametrize(
    ("classes", "words", "says"),
    [
        (2, ("--loss", "dlr"), "'y' has 2 classes, but the DLR loss requires at least 3\nhint: use --loss margin"),
        (3, ("--loss", "dlr", "--targeted", 1), "'y' has 3 classes, but the targeted DLR loss requires at least 4"),
        (3, ("--restarts", 2, "--no-start"), "all runs are equal\nhint: leave --no-start out"),
    ],
)
def test_what_does_not_fit_is_refused(
    attack: Callable[..., Result], classes: int, words: tuple[object, ...], says: str
) -> None:
    weights = ", ".join(map(str, range(2 * classes)))
    text = (
        f"net (float[N, 2] x) => (float[N, {classes}] y) <float[2, {classes}] w = {{{weights}}}> {{ y = MatMul(x, w) }}"
    )
    onnx.save(parser.parse_model(f'<ir_version: 10, opset_import: ["" : 18]> {text}'), "net.onnx")
    np.savez("data.npz", x=X[:, 0, 0, :2])
    result = attack("net.onnx", *words)
    error = result.document["error"]
    assert result.code == 2 and says in f"{error['message']}\nhint: {error['hint']}"
    refused = attack("net.onnx", "--restarts", 2, method="fgsm")
    assert refused.code == 2 and refused.document["error"]["hint"] == "use --method pgd"


def test_a_gradient_that_is_not_finite_moves_no_number(attack: Callable[..., Result]) -> None:
    """The derivative of sqrt(x²) is 0 / 0 at 0, and a sample of NaN would count as a success."""
    text = """<ir_version: 10, opset_import: ["" : 18]>
        net (float[N, 2] x) => (float[N, 2] y) <float[2, 2] w = {1, 3, 2, 1}>
        { s = Mul(x, x) r = Sqrt(s) y = MatMul(r, w) }"""
    onnx.save(parser.parse_model(text), "net.onnx")
    np.savez("data.npz", x=np.array([[0, 0], [0.5, 0]], np.float32))
    result = attack("net.onnx", "--no-start", "--epsilon", 0.1, "--no-verify")
    assert result.code == 0, result.err
    found = np.load("fooled.npz")["x"]
    assert np.isfinite(found).all() and (found[0] == 0).all() and found[1] == pytest.approx([0.4, 0])
    assert result.json["vanishing"] == 1


@pytest.mark.parametrize("seed", range(4))
def test_the_proof_of_targeted_dlr_draws_no_label_that_is_the_target(attack: Callable[..., Result], seed: int) -> None:
    """Then the loss is 0 whatever the input is, and so is its gradient."""
    text = '<ir_version: 10, opset_import: ["" : 18]> net (float[N, 3] x) => (float[N, 5] y) { y = MatMul(x, w) }'
    model, rng = parser.parse_model(text), np.random.default_rng(seed)
    weights = rng.standard_normal((3, 5)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    onnx.save(model, "net.onnx")
    np.savez("data.npz", x=X[:, 0, 0, :3])
    result = attack("net.onnx", "--loss", "dlr", "--targeted", 1, "--verify")
    assert result.code == 0 and result.json["proof"]["verdict"] == "proved", result.err


@pytest.mark.parametrize(
    ("more", "there", "absent"),
    [
        ((), ("fgsm", "cross-entropy", "L-inf", "own predictions", "another class", "'y'"), ("seed", "L2", "pgd")),
        (
            ("--norm", "2", "--steps", "4", "--step-size", "0.5", "--seed", "7", "--loss", "margin"),
            ("pgd in 4 steps of 0.5", "random start", "seed 7", "margin", "L2"), ("fgsm", "L-inf", "starts"),
        ),
        (("--restarts", "3", "--label", "label"), ("3 random starts", "seed 0"), ("predictions",)),
        (("--no-start", "--targeted", "2"), ("2",), ("seed", "another class")),
    ],
)  # fmt: skip
def test_the_attack_is_described(
    attack: Callable[..., Result], more: tuple[str, ...], there: tuple[str, ...], absent: tuple[str, ...]
) -> None:
    saved("net.onnx", 2)
    np.savez("data.npz", x=X, label=np.zeros(len(X), int))
    result = attack("net.onnx", "--no-verify", *more, method="fgsm" if not more else "pgd")
    assert result.code == 0, result.err
    what = result.json["what"]
    assert [word for word in there if word not in what] == [] and [word for word in absent if word in what] == [], what


def test_success_is_measured_on_the_samples_that_can_be_attacked() -> None:
    arrays = {name: np.zeros(4) for name in ("samples", "distances")}
    right = {"labels": np.r_[0, 1, 2, 3], "before": np.r_[0, 1, 2, 0], "after": np.r_[0, 2, 1, 3]}
    found = Fooled("", {}, **arrays, **right)
    assert (found.accuracy_before, found.accuracy_after, found.success) == (0.75, 0.5, pytest.approx(2 / 3))
    aimed = Fooled("", {}, **arrays, **right, targeted=1)
    assert aimed.success == pytest.approx(1 / 3)
    assert Fooled("", {}, **arrays, **{**right, "before": np.r_[1, 0, 0, 0]}).success is None
    assert Fooled("", {}, **arrays, **{**right, "before": np.r_[1, 1, 1, 1]}, targeted=1).success is None
