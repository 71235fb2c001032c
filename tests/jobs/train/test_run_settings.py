"""The settings of a run, as a checkpoint stores them and an error lists them."""

from __future__ import annotations

from pathlib import Path

import pytest

from onnxgrad_cli.common.packages import tool_version
from onnxgrad_cli.jobs.train.run_settings import CHANGEABLE, as_text, settings_of
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.options import Options
from onnxgrad_cli.options.data import SampleOptions, SequenceOptions
from onnxgrad_cli.options.train import Course


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""), ("", ""), ((), ""), ({}, ""), (0, "0"), (False, "off"), (True, "on"), (0.0, "0"), (1e-05, "1e-05"),
        (0.1234567, "0.123457"), ({"a": 1, "b": False}, "a=1, b=off"), (("x", "y"), "x, y"), ([1, 2.5], "1, 2.5"),
        (Path("a/b"), "a/b"), (len, "len"),
        (LossSpec("mse"), "mse"), (LossSpec("mse", "out"), "mse:out"), (LossSpec("mse", None, "y"), "mse::y"),
        (LossSpec("mse", weight=2.5), "mse:::2.5"), (LossSpec("mse", weight=2.0, schedule="cosine"), "mse:::2@cosine"),
        (LossSpec("mse", schedule="cosine"), "mse:::1@cosine"), (LossSpec("mse", "out", data="left"), "left=mse:out"),
    ],
)  # fmt: skip
def test_values_are_written_as_a_user_types_them(value: object, text: str) -> None:
    assert as_text(value) == text


def test_settings_of_a_run() -> None:
    samples, sequences = SampleOptions(columns={"a": "x"}), SequenceOptions(max_length=7)
    course = Course(batch_size=3, samples=samples, sequences=sequences)
    options = Options(optimizer_options={"weight_decay": 0.1}, loss_options={"y_1:label_smoothing": 0.2})
    found = settings_of(options, course, data="d.npz", val=None)
    assert found["onnxgrad"] == tool_version() and (found["data"], found["val"]) == ("d.npz", "")
    assert (found["batch_size"], found["max_length"], found["columns"]) == ("3", "7", "a=x")
    assert (found["optimizer"], found["losses"], found["shuffle"], found["seed"]) == ("adam", "mse", "on", "0")
    assert found["optimizer_options"] == "weight-decay=0.1" and found["loss_options"] == "y_1:label-smoothing=0.2"
    assert not found.keys() & {*CHANGEABLE, "samples", "sequences"}
    assert list(found) == ["onnxgrad", *sorted(name for name in found if name != "onnxgrad")]
    assert settings_of(Options(optimizer="sgd"), course)["optimizer"] == "sgd"
