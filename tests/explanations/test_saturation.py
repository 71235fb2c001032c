"""Saturated scores are named, with the loss or output that helps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from tests.cli_harness import Shell
from tests.explanations import nets

X = nets.samples()


LABELS = np.array([3, 0, 4, 1, 1])


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return nets.save(tmp_path_factory.mktemp("net"), y=LABELS)


def ended(tail: str, path: Path, scale: float = 30) -> ModelProto:
    """Save the network with scaled logits, and operators behind them."""
    text = nets.TEXT.replace("float[N, 5] logits", "float[N, 5] y").replace(", b3)", ", b3)" + tail)
    model = onnx.parser.parse_model(text)
    for name, array in nets.weights().items():
        scaled = array * np.float32(scale) if name in ("w3", "b3") else array
        model.graph.initializer.append(onnx.numpy_helper.from_array(scaled, name))
    for name, value in (("low", 1e-7), ("high", 1 - 1e-6)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(value), name))
    onnx.save(model, path)
    return model


@pytest.mark.parametrize(
    ("tail", "named"),
    [
        ("p = Softmax(logits) y = Clip(p, low, high)", ["Clip", "Softmax"]),
        ("p = Softmax(logits) c = Clip(p, low, high) y = Log(c)", ["Clip", "Softmax"]),
        ("c = Clip(logits, low, high) y = Softmax(c)", ["Clip"]),
    ],
)
def test_saturated_scores_are_named_with_the_output_before_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tail: str, named: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shell = Shell(tmp_path, capsys)
    np.savez("data.npz", x=X)
    ended(tail, Path("net.onnx"))
    ended("y = Identity(logits)", Path("cut.onnx"))
    given = ("--data", "data.npz", "--epsilon", "0.3", "--no-verify", "--json")
    result = shell("attack", "net.onnx", *given)
    assert result.code == 0 and result.json["vanishing"] > 0
    told = next(line for line in result.err.splitlines() if "does not show that the model is robust" in line)
    assert all(f"{op_type} '" in told for op_type in named)
    option = told.split("; attack with --output ")[1]
    assert option == "logits"
    after = shell("attack", "net.onnx", *given, "--output", option, "-o", "hinted.npz")
    assert after.code == 0 and after.json["vanishing"] == 0 and after.json["success"] > 0, after.err
    assert shell("attack", "cut.onnx", *given, "-o", "cut.npz").code == 0
    np.testing.assert_array_equal(np.load("hinted.npz")["x"], np.load("cut.npz")["x"])


@pytest.mark.parametrize(
    ("tail", "scores", "named", "options"),
    [
        ("p = Softmax(logits) y = Clip(p, low, high)", "logits", ["Clip", "Softmax"], ["--output", "--loss"]),
        ("y = Softmax(logits)", "logits", [], ["--loss"]),
        ("y = Identity(logits)", "y", [], ["--loss"]),
    ],
)
def test_the_margin_is_named_where_the_scores_are_too_far_apart_for_cross_entropy(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tail: str,
    scores: str,
    named: list[str],
    options: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    shell = Shell(tmp_path, capsys)
    ended(tail, tmp_path / "far.onnx", scale=1e4)
    np.savez(tmp_path / "data.npz", x=X)
    given = ("attack", "far.onnx", "--data", "data.npz", "--epsilon", "0.3", "--no-verify", "--json")
    result = shell(*given)
    told = next(line for line in result.err.splitlines() if "does not show that the model is robust" in line)
    assert all(f"{op_type} '" in told for op_type in named) and ("Softmax" in told) == ("Softmax" in named)
    assert f"scores in '{scores}' differ so much" in told
    words = told.split("; attack with ")[1].replace(" and ", " ").split()
    assert [word for word in words if word.startswith("-")] == options
    helped = shell(*given, *words)
    assert result.json["success"] == 0 and helped.json["success"] > 0 and helped.json["vanishing"] == 0


NAMES = ["ant", "bee", "cat", "dog", "eel"]


@pytest.fixture
def named(tmp_path: Path, files: tuple[Path, Path]) -> tuple[Path, Path]:
    """The network with the names of its classes, as a training or Ultralytics has stored them."""
    model = nets.model()
    model.metadata_props.add(key="names", value=str(dict(enumerate(NAMES))))
    onnx.save(model, tmp_path / "named.onnx")
    return tmp_path / "named.onnx", files[1]
