"""Sequences of known length are written out, and with them conditions on the ranks of their elements."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
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


OPTIONAL = """<ir_version: 8, opset_import: ["": 16]>
g (int64 n, bool c, float a) => (float y) <int64 first = {0}> {
  s = SequenceConstruct(a)
  o = Optional(s)
  r = Loop(n, c, o) <body = b (int64 i, bool ci, optional(seq(float)) oi) => (bool co, seq(float) so) {
    co = Identity(ci)
    has = OptionalHasElement(oi)
    no = Not(has)
    q = If(no) <then_branch = t () => (seq(float) z) { k = Constant<value = float {0.0}>() z = SequenceConstruct(k) },
      else_branch = e () => (seq(float) w) { w = OptionalGetElement(oi) }>
    so = SequenceInsert(q, a)
  }>
  y = SequenceAt(r, first)
}"""


def test_dstack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shell, derived = Shell(tmp_path, capsys), tmp_path / "derived.onnx"
    result = shell("derive", save(DSTACK, tmp_path / "model.onnx"), "-o", derived)
    assert result.code == 0 and "proved" in result.out, result.err
    g = np.float32(np.random.default_rng(0).standard_normal((1, 5, 2)))
    feeds = {"x": np.zeros(5, np.float32), "z": np.zeros(5, np.float32), "y_grad": g}
    x_grad, z_grad = onnxruntime.InferenceSession(derived).run(["x_grad", "z_grad"], feeds)
    np.testing.assert_array_equal([x_grad, z_grad], g[0].T)


def test_a_sequence_of_known_length_is_edited_as_a_list_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The elements are z, w and x at the end; there were two of them before the last was appended."""
    text = """<ir_version: 8, opset_import: ["": 18]>
    g (float[3] x, float[3] z, float[3] w) => (float[3, 3] y) <int64 one = {1}, int64 first = {-3}> {
      s = SequenceConstruct(x, z)
      i = Identity(s)
      k = SequenceInsert(i, w, one)
      e = SequenceErase(k, first)
      n = SequenceLength(e)
      m = SequenceInsert(e, x)
      c = ConcatFromSequence<axis = 0, new_axis = 1>(m)
      f = CastLike(n, c)
      y = Mul(c, f)
    }"""
    x, z, w = np.arange(3), np.arange(3, 6), np.arange(6, 9)
    elements = [x, z]
    elements.insert(1, w)
    del elements[-3]
    assert [len(elements), *map(id, elements)] == [2, id(w), id(z)]
    shell, derived = Shell(tmp_path, capsys), tmp_path / "derived.onnx"
    file = save(text, tmp_path / "model.onnx")
    result = shell("derive", file, "--option", "keep-outputs", "--no-verify", "-o", derived)
    assert result.code == 0, result.err
    assert not [node.op_type for node in onnx.load(derived).graph.node if "Sequence" in node.op_type]
    feeds = {name: np.float32(value) for name, value in {"x": x, "z": z, "w": w}.items()}
    g = np.float32(np.random.default_rng(0).standard_normal((3, 3)))
    names = ["y", "w_grad", "z_grad", "x_grad"]
    y, *grads = onnxruntime.InferenceSession(derived).run(names, {**feeds, "y_grad": g})
    np.testing.assert_array_equal(y, 2 * np.stack([*elements, x]))
    np.testing.assert_array_equal(grads, 2 * g)


def test_a_loop_that_turns_an_optional_into_a_sequence_is_valid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """onnx's checker accepts it, and onnxruntime runs it: what is missing is the gradient of an optional."""
    file = save(OPTIONAL, tmp_path / "model.onnx")
    result = Shell(tmp_path, capsys)("derive", file, "-o", tmp_path / "derived.onnx")
    assert result.code == 3 and "optional" in result.err, result.err


def test_the_second_derivative_of_an_element_of_a_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The cotangent of a sequence whose length is unknown is a SequenceMap, which is differentiated again."""
    text = """<ir_version: 8, opset_import: ["": 18]>
    g (float[n, 4] x) => (float[4] y) <int64 one = {1}, int64 two = {2}> {
      s = SplitToSequence<axis = 0, keepdims = 0>(x)
      a = SequenceAt(s, one)
      b = SequenceAt(s, two)
      y = Mul(a, b)
    }"""
    file, derived = save(text, tmp_path / "model.onnx"), tmp_path / "derived.onnx"
    result = Shell(tmp_path, capsys)("derive", file, "--kind", "hessian", "-o", derived)
    assert result.code == 0, result.err
    x = np.float32(np.random.default_rng(0).standard_normal((4, 4)))
    (hessian,) = onnxruntime.InferenceSession(derived).run(None, {"x": x})
    expected = np.zeros((4, 4, 4, 4), np.float32)
    for i in range(4):
        expected[1, i, 2, i] = expected[2, i, 1, i] = 1
    np.testing.assert_allclose(hessian, expected, atol=1e-6)
