"""Losses whose parts of a batch don't add up are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import parser

from onnxgrad_cli import LossSpec
from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.training.distributed.communicator import Communicator
from onnxgrad_cli.training.steps.parallel import ParallelTrainer
from tests.communicators import together
from tests.facts import raises
from tests.training.steps.test_parallel import mlp


def test_labels_left_out_of_one_of_two_losses_are_refused() -> None:
    losses = (LossSpec("cross-entropy"), LossSpec("cross-entropy", label="z"))

    def step(link: Communicator) -> None:
        trainer = ParallelTrainer(mlp(losses=losses), link, threads=1)
        feeds = {"x": np.zeros((4, 64), np.float32), "y": np.zeros(4, np.int64), "z": np.zeros(4, np.int64)}
        x = next(name for name in trainer.inputs if name not in "yz")
        feeds[x] = feeds.pop("x").reshape(4, *(d.dim_value for d in trainer.inputs[x].tensor_type.shape.dim[1:]))
        feeds["z"][: 3 * link.rank] = -100
        trainer.step(feeds, 0.1)

    with raises(OnnxgradError, "conflict"):
        together(2, step)


def total(op, prediction, label):
    return op.sum(prediction - label, range(prediction.rank), keepdims=False)


def centered(op, prediction, label):
    return prediction - op.mean(prediction, [0]) - label


def of_a_mean(op, prediction, label):
    return op.grad(op.mean(prediction * prediction), prediction) - label


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"reduction": "sum", "l2": 0.1}, ("l1", "l2")),
        ({"losses": (LossSpec("loss.onnx"),)}, ("loss.onnx", "logits")),
        ({"losses": (LossSpec("total", function=total),)}, ("total", "logits")),
        ({"losses": (LossSpec("centered", function=centered),)}, ("centered", "logits", "ReduceMean", "ReduceMean")),
        ({"losses": (LossSpec("of_a_mean", function=of_a_mean),)}, ("of_a_mean", "logits", "of_a_mean", "ReduceMean")),
    ],
)
def test_what_parts_do_not_add_up_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], expected: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(
        parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        squares (float[n, 10] prediction, float[n, 10] label) => (float loss)
        { d = Sub(prediction, label)  s = Mul(d, d)  loss = ReduceMean <keepdims = 0> (s) }"""),
        "loss.onnx",
    )
    with raises(UsageError, "conflict", *expected):
        together(2, lambda link: ParallelTrainer(mlp(**more), link, threads=1))
