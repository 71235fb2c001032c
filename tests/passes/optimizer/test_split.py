"""A training step cut in two: both halves run by themselves, and together they are the whole, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto

from onnxgrad_cli import LossSpec, Options, build
from onnxgrad_cli.builder import TrainingModel
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.metadata import read
from onnxgrad_cli.optimizers import OPTIMIZERS
from onnxgrad_cli.passes.optimizer.split import narrowed, split
from tests.facts import raises

ROOT = Path(__file__).parents[3]
RATE = {"learning_rate": np.array(0.01, np.float32)}


def digits(optimizer: str = "adam", **more: Any) -> TrainingModel:
    model = onnx.load(ROOT / "sample_models" / "digits_cnn.onnx")
    return build(model, Options(losses=(LossSpec("cross-entropy"),), label="y", optimizer=optimizer, **more))


def batch(size: int = 16) -> dict[str, np.ndarray]:
    data = np.load(ROOT / "sample_models" / "digits.npz")
    return {"x": data["train_x"][:size], "y": data["train_y"][:size]}


def run(model: ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    onnxruntime.set_default_logger_severity(3)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    own = {value.name for value in session.get_inputs()} | {v.name for v in session.get_overridable_initializers()}
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, {n: x for n, x in feeds.items() if n in own}), strict=True))


SETTINGS: list[dict[str, Any]] = [
    *({"optimizer": each.name, "mode": "train"} for each in OPTIMIZERS),
    {"keep_outputs": True},
    {"optimizer": "sgd", "clip_norm": 0.1},
    {"optimizer": "adamw", "accumulate": 2},
    {"optimizer": "momentum", "loss_scale": "dynamic"},
    {"optimizer": "sgd", "ema": 0.9},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.thinned(9, 3)
def test_the_halves_are_the_whole(settings: dict[str, Any]) -> None:
    whole = digits(**settings).model
    halves = split(whole)
    for half in (halves.gradient, halves.optimizer):
        onnx.checker.check_model(half, full_check=True)
    assert not {n.name for n in halves.optimizer.graph.node} & {n.name for n in halves.gradient.graph.node}
    feeds = {**batch(), **RATE}
    for _ in range(3):
        wanted = run(whole, feeds)
        first = run(halves.gradient, feeds)
        found = {**first, **run(halves.optimizer, {**feeds, **first})}
        assert wanted.keys() <= found.keys()
        for name, array in wanted.items():
            np.testing.assert_array_equal(found[name], array, err_msg=name)
        outputs = read(whole).outputs
        feeds |= {role.of: wanted[name] for name, role in outputs.items() if role.role == "next state"}


def test_the_halves_describe_themselves() -> None:
    whole = digits(mode="train", optimizer="adamw").model
    halves = split(whole)
    gradient, optimizer, roles = read(halves.gradient), read(halves.optimizer), read(whole)
    assert set(gradient.inputs.values()) == {"model input", "label", "weight", "state"} and gradient.loss == "loss"
    assert gradient.gradients == roles.gradients and gradient.optimizer == ""
    statistics = {role.of for role in gradient.outputs.values() if role.role == "next state"}
    assert statistics == {n for n in roles.inputs if "running" in n}
    assert {n for n, role in optimizer.inputs.items() if role == "gradient"} == set(roles.gradients.values())
    assert set(optimizer.inputs.values()) == {"gradient", "learning rate", "weight", "state"}
    stepped = {role.of for role in optimizer.outputs.values()}
    assert stepped == {n for n, role in roles.inputs.items() if role in ("weight", "state")} - statistics


def test_the_gradient_half_is_what_is_built_without_an_optimizer() -> None:
    half, alone = split(digits().model).gradient, digits("").model
    assert [n.SerializeToString() for n in half.graph.node] == [n.SerializeToString() for n in alone.graph.node]
    assert [v.name for v in half.graph.output] == [v.name for v in alone.graph.output]


def test_narrowed_computes_less() -> None:
    half = split(digits().model).gradient
    loss = narrowed(half, ["loss"])
    assert len(loss.graph.node) < len(half.graph.node) and run(loss, batch()).keys() == {"loss"}


def test_what_has_no_optimizer_is_refused() -> None:
    with raises(UsageError, "wrong_type"):
        split(digits("").model)
    with pytest.raises(UsageError, match="not a training model"):
        split(onnx.load(ROOT / "sample_models" / "digits_cnn.onnx"))
