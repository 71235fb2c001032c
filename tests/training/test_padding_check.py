"""Padding must not change a loss: statistics, masks and validation samples are checked."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import numpy as np
import onnx
import pytest

from onnxgrad_cli.data.ragged import Ragged
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.training.evaluation import EvalResult
from onnxgrad_cli.training.padding_check import check_padding
from tests.cli_harness import Shell
from tests.data.test_ragged import drawn_molecules, train, write_lines, write_molecules


@pytest.fixture(scope="module")
def molecules() -> list[dict[str, Any]]:
    return drawn_molecules()


@pytest.fixture
def shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], molecules: list[dict[str, Any]]
) -> Shell:
    monkeypatch.chdir(tmp_path)
    write_molecules(molecules)
    return Shell(tmp_path, capsys)


def test_padding_is_kept_out_of_statistics(shell: Shell) -> None:
    text = """<ir_version: 10, opset_import: ["": 18]>
        g (float[molecules, atoms, 3] positions, float[molecules, atoms] mask) => (float[molecules, 1] energy)
        <float[1] s = {1}, float[1] b = {0}, float[1] m = {0}, float[1] v = {1}, float[3, 1] w = {1, 2, 3},
         int64[1] last = {2}, int64[2] shape = {0, -1}, int64[3] split = {0, 1, -1}, int64[1] one = {1}>
        { a = MatMul(positions, w) c = Squeeze(a, last) d = Reshape(c, split) e = BatchNormalization(d, s, b, m, v)
          f = Reshape(e, shape) g = Mul(f, mask) energy = ReduceSum(g, one) }"""
    onnx.save(onnx.parser.parse_model(text), "normal.onnx")
    more = ("--mode", "train", "--epochs", 1, "-o", "t.onnx")
    done = train(shell, "normal.onnx", "plain", "--batch-size", 4, *more)
    assert done.code == 2 and "BatchNormalization" in done.facts, done.err
    assert not Path("t.onnx").exists()
    done = train(shell, "normal.onnx", "plain", "--batch-size", 4, *more, "--mode", "eval")
    assert done.code == 0, done.err


def test_validation_samples_are_checked_too(shell: Shell) -> None:
    write_lines([{"positions": np.ones((2, 3)), "label": [1.0], "force": np.ones((2, 3))}] * 4, Path("even.jsonl"))
    more = ("--loss", "losses.py:masked", "--data", "even.jsonl", "--val", "molecules.jsonl", "-o", "t.onnx")
    done = shell("train", "net.onnx", *more)
    assert done.code == 2 and done.facts[:3] == ("usage", "molecules.jsonl", "5"), done.err
    done = shell("train", "masked.onnx", *more, "--epochs", 1)
    assert done.code == 0, done.err


def test_padding_needs_masks(shell: Shell) -> None:
    for model, loss, said in (
        ("net.onnx", "alone", "no mask shows the real entries of 'positions' along its axis 'atoms'"),
        ("masked.onnx", "alone", "the loss alone takes no mask for 'force'"),
    ):
        done = train(shell, model, loss, "--batch-size", 4, "-o", "t.onnx")
        assert done.code == 2 and said in done.err
        assert "--batch-size 1 with --accumulate N" in done.err and "'mask INPUT'" in done.err
    for done in (
        train(shell, "net.onnx", "masked", "--epochs", 1, "-o", "t.onnx"),
        shell("evaluate", "net.onnx", "--loss", "losses.py:masked", "--data", "molecules.jsonl"),
    ):
        assert done.code == 2 and done.facts[:3] == ("usage", "molecules.jsonl", "5")
    more = ("--epochs", 1, "-o", "t.onnx")
    assert train(shell, "net.onnx", "masked", "--batch-size", 1, *more).code == 0
    done = train(shell, "masked.onnx", "per_atom", "-o", "u.onnx")
    assert done.code == 2 and done.facts == ("wrong_shape", "losses", "per_atom", "real", "molecules", "atoms")
    assert not Path("u.onnx").exists()


@pytest.mark.parametrize(
    ("alone", "padded", "dtype", "fits"),
    [
        (1.0, 1.0005, np.float32, True), (1.0, 1.002, np.float32, False), (1.0, 1.015, np.float16, True),
        (1.0, 1.03, np.float16, False), (0.0, 5e-7, np.float32, True), (0.0, 5e-6, np.float32, False),
        (math.nan, 0.0, np.float32, True), (math.nan, 1.0, np.float32, False),
    ],
)  # fmt: skip
def test_losses_may_differ_by_rounding(alone: float, padded: float, dtype: type, fits: bool) -> None:
    """The smallest sample is at row 2 and the largest at row 0. A loss that ignores all labels is nan, and counts 0."""
    data = MagicMock(
        arrays={"x": Mock(spec=Ragged, elements=SimpleNamespace(lengths=np.array([5, 3, 1])))}, batch_size=None,
        padding=SimpleNamespace(obstacle=None), rows=lambda rows: rows, same=(), axes={}, source="d.jsonl",
        batch=lambda rows: {"x": rows[:, None] * np.ones((len(rows), 5 if 0 in rows else 1))},
    )  # fmt: skip
    data.__len__.return_value = 3
    fed: list[np.ndarray] = []

    def session(feeds: dict[str, np.ndarray], weights: object) -> EvalResult:
        fed.append(feeds["net.x"])
        return EvalResult({"y": np.zeros(1, dtype)}, [padded if len(fed) > 1 else alone], [None], 0.0)

    session.weights = [1.0]  # type: ignore[attr-defined]
    try:
        check_padding(session, data, {"x": "net.x"}, {})  # type: ignore[arg-type]
        assert fits
    except UsageError as error:
        assert not fits and "'d.jsonl'" in error.message and " 2 " in error.message
    assert [array.tolist() for array in fed] == [[[2.0]], [[2.0] * 5]]
