"""Losses as a user names them, and the options of each."""

from __future__ import annotations

from pathlib import Path

from onnxgrad_cli.builder import build
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.losses.spec import LossSpec, parse_loss
from onnxgrad_cli.metadata import describe
from onnxgrad_cli.options import Options
from tests.facts import raises
from tests.losses.test_registry import functions
from tests.losses.test_same_shape import built

SAMPLES = Path(__file__).parents[2] / "sample_models"


def test_what_is_asked_for_may_be_a_name_a_function_or_several() -> None:
    focal = functions()["focal"]
    assert Options(losses="mse").losses == (LossSpec("mse"),)  # type: ignore[arg-type]
    assert Options(losses="mse:p:y:0.5").losses == (LossSpec("mse", "p", "y", 0.5),)  # type: ignore[arg-type]
    assert Options(losses=LossSpec("mse")).losses == (LossSpec("mse"),)  # type: ignore[arg-type]
    assert Options(losses=["mae", focal]).losses == (LossSpec("mae"), LossSpec("focal", function=focal))  # type: ignore[arg-type]
    found = parse_loss("a/b.py:focal:out:y:2", lambda file, name: {("a/b.py", "focal"): focal}[file, name])
    assert found == LossSpec("focal", "out", "y", 2.0, focal)


def test_options_of_nobody_are_refused() -> None:
    focal = functions()["focal"]
    with raises(UsageError, "unknown_name", "loss_options", "q"):
        built((2, 3), Options(losses=focal, loss_options={"q:gamma": 1.0}, grad_of_input=("x",)))
    with raises(UsageError, "unknown_name", "gama"):
        built((2, 3), Options(losses=focal, loss_options={"p:gama": 1.0}, grad_of_input=("x",)))


def test_two_losses_have_options_of_their_own() -> None:
    options = Options(
        losses=("cross-entropy:logits:a", "cross-entropy:logits:b"),  # type: ignore[arg-type]
        loss_options={"a:ignore_index": 7, "label_smoothing": 0.1},
    )
    model = build(str(SAMPLES / "digits_mlp.onnx"), options).model
    assert [term.ignore_index for term in describe(model).losses] == [7, -100]
