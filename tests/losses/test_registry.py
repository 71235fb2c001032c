"""Losses as Python functions, against PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto

from onnxgrad_cli.builder import build
from onnxgrad_cli.data import ranges_of
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.options import Options
from tests.cli_harness import Shell
from tests.facts import raises, raises_as
from tests.losses.test_same_shape import built, run

SAMPLES = Path(__file__).parents[2] / "sample_models"
FOCAL = '''
def focal(op, prediction, label: "class", *, gamma: float = 2.0):
    """The focal loss of T.-Y. Lin et al., 2017: samples that are met well count less."""
    logs = op.LogSoftmax(prediction, axis=1)
    picked = op.squeeze(op.GatherElements(logs, op.unsqueeze(label, [1]), axis=1), [1])
    return -picked * op.Pow(1 - op.Exp(picked), gamma)

def broken(op, prediction, label):
    return op.Nothing(prediction)

def none(op, prediction, label):
    return 3

def whole(op, prediction, label):
    return op.cast(prediction, 7)
'''


def functions() -> dict[str, Callable[..., Any]]:
    found: dict[str, Any] = {}
    exec(FOCAL, found)
    return found


def of_torch(x: np.ndarray, y: np.ndarray, gamma: float) -> tuple[float, np.ndarray]:
    """The focal loss as PyTorch's users write it, in float64."""
    logits = torch.tensor(x, requires_grad=True)
    crossed = F.cross_entropy(logits, torch.tensor(y), reduction="none")
    loss = ((1 - torch.exp(-crossed)) ** gamma * crossed).mean()
    loss.backward()
    assert logits.grad is not None
    return loss.item(), logits.grad.numpy()


@pytest.mark.parametrize("options", [{}, {"gamma": 0.5}, {"p:gamma": 3.0, "gamma": 1.0}, {"label:gamma": 1.5}])
def test_a_function_has_the_value_and_gradient_that_it_has_in_pytorch(options: dict[str, float]) -> None:
    random = np.random.default_rng(0)
    x, y = random.normal(size=(6, 5)), random.integers(0, 5, 6)
    model = built(x.shape, Options(losses=functions()["focal"], loss_options=options, grad_of_input=("x",)))
    value, gradient = run(model, {"x": x, "label": y})
    wanted = of_torch(x, y, [*options.values(), 2.0][0])
    np.testing.assert_allclose(value, wanted[0], rtol=1e-12)
    np.testing.assert_allclose(gradient, wanted[1], rtol=1e-9, atol=1e-15)


def test_a_function_says_what_its_label_is() -> None:
    def scored(op: Any, prediction: Any) -> Any:
        return prediction * prediction

    def apart(op: Any, prediction: Any, label: Any, *, power=2) -> Any:  # type: ignore[no-untyped-def]
        return op.Pow(op.Abs(prediction - label), float(power))

    apart.__annotations__.pop("label")
    found = [LossSpec("a", function=each).loss for each in (scored, apart, functions()["focal"])]
    assert [loss.label for loss in found if loss] == ["none", "same", "class"]
    assert [[(option.name, option.kind) for option in loss.options] for loss in found if loss] == [
        [], [("power", "int")], [("gamma", "float")],
    ]  # fmt: skip

    def wrong(op: Any, prediction: Any, label: int) -> Any: ...
    def keyword(op: Any, prediction: Any, label: "class", *, how: str = "") -> Any: ...  # type: ignore[valid-type]  # noqa: F722

    with raises(UsageError, "wrong_value", "wrong", "int"):
        Options(losses=wrong)  # type: ignore[arg-type]
    with raises(UsageError, "missing_value", "keyword", "how"):
        Options(losses=keyword)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("broken", "the function 'broken' raised an error: "),
        ("none", ("wrong_type", "losses", "none")),
        ("whole", ("wrong_type", "losses", "whole", "int64", "3")),
    ],
)
def test_a_function_that_is_wrong_is_told_so(name: str, said: str | tuple[str, ...]) -> None:
    with raises_as(UsageError, said):
        built((2, 3), Options(losses=functions()[name], grad_of_input=("x",)))


def test_the_classes_of_a_function_are_known(tmp_path: Path) -> None:
    model = build(str(SAMPLES / "digits_mlp.onnx"), Options(losses=functions()["focal"])).model
    assert (ranges_of(model)["label"].low, ranges_of(model)["label"].high) == (0, 9)


def test_the_command_takes_code_that_is_typed_alone(shell: Shell) -> None:
    Path("my_loss.py").write_text(FOCAL)
    Path("c.toml").write_text('loss = ["my_loss.py:focal"]')
    model = str(SAMPLES / "digits_mlp.onnx")
    assert (
        shell("build", model, "--loss", "my_loss.py:focal", "--loss-option", "logits:gamma=1", "-o", "f.onnx").code == 0
    )
    for arguments, code, expected in (
        (("--config", "c.toml"), 2, ("usage", "losses", "my_loss.py:focal")),
        (("--loss", "my_loss.py:fokal"), 2, ("unknown_name", "losses", "my_loss.py", "fokal")),
        (("--loss", "your_loss.py:focal"), 1, ("missing_file", "losses", "your_loss.py")),
    ):
        found = shell("build", model, *arguments, "-o", "g.onnx")
        assert found.code == code and found.facts == expected, found.err


@pytest.mark.parametrize("shape", [(4, 5), (4, 5, 3), (4, 5, 3, 2)])
def test_fewer_labels_than_samples_end_the_run(shape: tuple[int, ...]) -> None:
    """GatherElements takes them, and the gradient would be that of as many labels as samples."""
    options = Options(losses=(LossSpec("cross-entropy"),), grad_of_input=("x",))
    model = built(shape, options, dtype=TensorProto.FLOAT)
    for count in (4, 1, 2):
        feeds = {"x": np.ones(shape, np.float32), "label": np.zeros((count, *shape[2:]), np.int64)}
        if count == 4:
            assert run(model, feeds)
        else:
            with pytest.raises(Exception, match="running Reshape node"):
                run(model, feeds)
