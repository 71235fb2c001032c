"""Padding must not change a loss: statistics, masks and validation samples are checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

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
    assert done.code == 2 and done.facts == ("usage", "losses", "per_atom", "real", "molecules", "atoms")
    assert not Path("u.onnx").exists()
