"""The scale of the loss beside torch.amp.GradScaler, and what float16 gains by it."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from onnxgrad_cli.builder import build
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.metadata import describe
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.loss_scale import parse_loss_scale
from onnxgrad_cli.verification.proof import prove
from tests.facts import raises_as
from tests.steps import RATE, STEPS, Batch, assert_same, batches, exported, loss, network, options, trained

BAD = (20, 30, 31)
"""Steps of which a sample weighs so much that its gradient is finite, and times the scale is not."""

ALMOST = 1995
"""Good steps before the first one, so that the scale grows in between."""


def weighed(data: list[Batch]) -> list[Batch]:
    found = []
    for at, (x, y) in enumerate(data):
        weights = np.ones(len(y), np.float32)
        weights[3] = 1e37 if at in BAD else 1.0
        found.append((x, y, weights))
    return found


@pytest.mark.parametrize("runs", [1, 2])
def test_beside_torch(runs: int) -> None:
    """Scale, count and weights: steps with an infinite gradient are left out, and halve the scale."""
    net = network(torch.float32)
    data = weighed(batches("float32"))
    asked = options("adam", loss_scale="dynamic", sample_weight="sample_weight", accumulate=runs, clip_norm=0.1)
    begin = {"good_steps": ALMOST}
    seen: list[tuple[float, int, int]] = []
    ours = trained(
        build(exported(net), asked).model, data, begin=begin,
        see=lambda held: seen.append((float(held["loss_scale"]), int(held["good_steps"]), int(held["step"]))),
    )  # fmt: skip
    theirs = torch.optim.Adam(net.parameters(), lr=RATE)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))  # it makes its state then
    scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": begin["good_steps"]})
    for at in range(0, len(data), runs):
        theirs.zero_grad()
        for batch in data[at : at + runs]:
            scaler.scale(loss(net, batch) / runs).backward()
        scaler.unscale_(theirs)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        scaler.step(theirs)
        scaler.update()
        said = scaler.state_dict()
        assert seen[at + runs - 1][:2] == (said["scale"], said["_growth_tracker"])
    bad = len({at // runs for at in BAD})
    assert ours["step"] == STEPS // runs - bad
    assert any(after[0] == 2 * before[0] for before, after in itertools.pairwise(seen))
    assert_same(ours, net, 1e-5)


@pytest.mark.parametrize("scale", [1024.0, 3.0, "dynamic"])
def test_gradients_are_what_they_are_without(scale: Any) -> None:
    def gradients(asked: Any) -> list[np.ndarray]:
        model = build(exported(network(torch.float32)), options("sgd", loss_scale=asked)).model
        assert describe(model).gradients["first.weight"] == "first.weight_grad"
        fed = {"x": x, "y": y, "learning_rate": np.array(0, np.float32)}
        names = list(describe(model).gradients.values())
        return ort.InferenceSession(model.SerializeToString()).run(names, fed)

    ((x, y),) = batches("float32", 1)
    for ours, expected in zip(gradients(scale), gradients(None), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-8)


def half(weight: np.ndarray) -> onnx.ModelProto:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT16, ["n", 4]) for name in ("x", "logits"))
    nodes = [helper.make_node("MatMul", ["x", "w"], ["logits"])]
    stored = numpy_helper.from_array(weight.astype(np.float16), "w")
    graph = helper.make_graph(nodes, "half", [x], [y], [stored])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


WEIGHT = np.random.default_rng(0).standard_normal((4, 4))


def test_gradients_that_float16_does_not_hold() -> None:
    """Without a scale most are zero; with one they leave as float32, right to what float16 computes."""
    rng = np.random.default_rng(1)
    x, y = (rng.standard_normal((64, 4)) * 1e-5).astype(np.float16), rng.integers(0, 4, 64)
    w = torch.tensor(WEIGHT.astype(np.float16).astype(np.float64), requires_grad=True)
    torch.nn.functional.cross_entropy(torch.tensor(x, dtype=torch.float64) @ w, torch.tensor(y)).backward()
    expected = w.grad.numpy()

    def gradient(scale: float | None) -> np.ndarray:
        model = build(half(WEIGHT), options("", loss_scale=scale)).model
        return ort.InferenceSession(model.SerializeToString()).run(["w_grad"], {"x": x, "y": y})[0]

    plain, scaled = gradient(None), gradient(65536.0)
    assert plain.dtype == np.float16 and scaled.dtype == np.float32
    size = np.abs(expected).max()
    assert np.abs(plain - expected).max() > 0.01 * size
    assert np.abs(scaled - expected).max() < 0.002 * size


def test_float16_finds_its_scale() -> None:
    """The first steps overflow; then a scale is found at which the loss falls.

    By onnx's own evaluator: onnxruntime computes products of float16 in float32 on the processor, and passes that on.
    """
    rng = np.random.default_rng(1)
    batch = ((rng.standard_normal((64, 4)) * 50).astype(np.float16), rng.integers(0, 4, 64))
    model = build(half(WEIGHT), options("adam", loss_scale="dynamic")).model
    assert prove(model, describe(model)).status == "passed"
    seen: list[tuple[float, float]] = []
    after = trained(
        model, [batch] * 20, 0.05, engine=ReferenceEvaluator,
        see=lambda held: seen.append((float(held["loss"]), float(held["loss_scale"]))),
    )  # fmt: skip
    skipped = 20 - int(after["step"])
    losses, scales = zip(*seen, strict=True)
    assert 0 < skipped < 10
    assert scales == tuple(65536 / 2 ** min(step, skipped) for step in range(1, 21))
    assert losses[0] == losses[skipped] > losses[-1]
    assert np.isfinite(after["w"]).all()


def test_the_seed_may_be_fed() -> None:
    asked = options("", loss_scale=8.0, yield_="input")
    model = build(exported(network(torch.float32)), asked).model
    ((x, y),) = batches("float32", 1)
    (seed,) = (name for name, role in describe(model).inputs.items() if role == "loss gradient")
    session = ort.InferenceSession(model.SerializeToString())
    one, three = (
        session.run(["last.bias_grad"], {"x": x, "y": y, seed: np.array(g, np.float32)})[0] for g in (1.0, 3.0)
    )
    np.testing.assert_allclose(3 * one, three, rtol=1e-6)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "dynamo", "true"])
def test_what_is_no_scale_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="`loss_scale`"):
        parse_loss_scale(text)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"loss_scale": "dynamic"}, "requires an optimizer, because it adapts the scale at each step"),
        ({"loss_scale": 8.0, "as_gradient_op": True}, ("conflict", "as_gradient_op", "loss_scale")),
        ({"loss_scale": float("nan")}, "`loss_scale`"),
    ],
)
def test_what_does_not_fit_is_refused(given: dict[str, Any], words: str | tuple[str, ...]) -> None:
    with raises_as(UsageError, words):
        build(exported(network(torch.float32)), Options(**given))
