"""Sequences of known length are written out, and with them conditions on the ranks of their elements."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from tests.cli_harness import Shell, save

DSTACK = """<ir_version: 8, opset_import: ["": 18]>
g (float[5] x, float[5] z) => (float[1, 5, 2] y)
<int64[3] front = {1, -1, 1}, int64[1] last = {-1}, int64 one = {1}, int64 two = {2}, int64 first = {0}> {
  s = SequenceConstruct(x, z)
  d = SequenceMap<body = each (float[5] t) => (e) {
    shape = Shape(t)
    rank = Size(shape)
    limit = CastLike(one, rank)
    flat = LessOrEqual(rank, limit)
    e = If(flat) <then_branch = a () => (p) { p = Reshape(t, front) }, else_branch = b () => (q) {
      other = CastLike(two, rank)
      matrix = Equal(rank, other)
      q = If(matrix) <then_branch = c () => (v) { v = Unsqueeze(t, last) },
        else_branch = k () => (w) { w = Identity(t) }>
    }>
  }>(s)
  f = SequenceAt(d, first)
  h = SequenceAt(d, one)
  y = Concat<axis = 2>(f, h)
}"""
"""torch.dstack, as PyTorch's exporter writes it."""


def test_dstack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shell, derived = Shell(tmp_path, capsys), tmp_path / "derived.onnx"
    result = shell("derive", save(DSTACK, tmp_path / "model.onnx"), "-o", derived)
    assert result.code == 0 and "proved" in result.out, result.err
    g = np.float32(np.random.default_rng(0).standard_normal((1, 5, 2)))
    feeds = {"x": np.zeros(5, np.float32), "z": np.zeros(5, np.float32), "y_grad": g}
    x_grad, z_grad = onnxruntime.InferenceSession(derived).run(["x_grad", "z_grad"], feeds)
    np.testing.assert_array_equal([x_grad, z_grad], g[0].T)
