"""The sizes at which models are proved on random data, through the command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from tests.cli_harness import Shell

HEAD = '<ir_version: 8, opset_import: ["": 17]>'
GRU = f"""{HEAD} g (FLOAT[time, batch, 3] x, FLOAT[1, FIXED, 4] h) => (FLOAT[time, 1, batch, 4] y)
{{ y = GRU<hidden_size = 4>(x, w, r, , , h) }}"""
CONCAT = f"""{HEAD} g (float[batch, 4] x) => (float[batch, 6] y) <float[1, 2] style = {{0.5, -0.3}}>
{{ a = MatMul(x, w) s = Tanh(a) y = Concat<axis = 1>(s, style) }}"""
SOUND = f"""{HEAD} g (float[batch, samples] x, float[2, batch, 4] state) => (float[batch, 4] y)
<int64[4] pads = {{0, 96, 0, 96}}, int64[1] one = {{1}}> {{
  p = Pad<mode = "reflect">(x, pads) q = Unsqueeze(p, one)
  c = Conv<strides = [64]>(q, kernel) m = GlobalAveragePool(c) n = Flatten(m)
  s = ReduceSum<keepdims = 0>(state, zero) t = Add(n, s) y = Tanh(t)
}}"""


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path, capsys)


def model(text: str, **weights: tuple[int, ...]) -> onnx.ModelProto:
    """Return the model of a text, with random weights of these shapes."""
    found, rng = parser.parse_model(text), np.random.default_rng(0)
    dtype = np.float64 if "double" in text else np.float32
    for name, shape in weights.items():
        found.graph.initializer.append(numpy_helper.from_array(rng.standard_normal(shape).astype(dtype), name))
    return found


def gru(fixed: str, dtype: str = "float") -> onnx.ModelProto:
    text = GRU.replace("FLOAT", dtype).replace("FIXED", fixed)
    return model(text, w=(1, 12, 3), r=(1, 12, 4))


def built(shell: Shell, proto: onnx.ModelProto, *options: str) -> Any:
    onnx.save(proto, shell.folder / "m.onnx")
    return shell("build", "m.onnx", "--loss", "mse", "-o", "out.onnx", *options)


def test_a_model_that_takes_batches_of_1_alone_is_proved_at_1(shell: Shell) -> None:
    """The state of the first has a batch of 1, in a file that says otherwise of its data."""
    for proto, sizes in ((gru("1"), "time = 8, batch = 1"), (model(CONCAT, w=(4, 4)), "batch = 1")):
        result = built(shell, proto)
        assert result.code == 0 and f", with {sizes}\n" in result.out, result.out
        assert f"random, with {sizes}" in (shell.folder / "out.onnx.report.md").read_text()
        (shell.folder / "out.onnx").unlink()


def test_the_only_size_that_is_large_is_the_one_that_must_be(shell: Shell) -> None:
    """A batch beside states is one of 2; the sound must be longer than its padding."""
    proto = model(SOUND, kernel=(4, 1, 256))
    proto.graph.initializer.append(numpy_helper.from_array(np.array([0]), "zero"))
    assert ", with batch = 2, samples = 128\n" in built(shell, proto).out


def test_no_data_are_asked_for_where_onnxruntime_lacks_a_kernel(shell: Shell) -> None:
    result = built(shell, gru("batch", "double"))
    assert "not proved: runs:" in result.out and "no kernel" in result.out and "GRU" in result.out
    assert "--test-data" not in result.out


def test_what_runs_at_no_size_is_said_in_the_runtimes_own_words_with_what_helps(shell: Shell) -> None:
    text = f"""{HEAD} g (float[batch, 4] x) => (float[batch, 2] y) <int64[2] s = {{331, -1}}>
    {{ a = MatMul(x, w) b = Reshape(a, s) c = ReduceSum<keepdims = 1>(b) y = Mul(a, c) }}"""
    result = built(shell, model(text, w=(4, 2)))
    assert "not proved: runs:" in result.out and ": Reshape" in result.out, result.out
    assert "--dim batch=SIZE" in result.out and "--test-data" in result.out
    result = built(shell, model(text, w=(4, 2)), "--dim", "batch=331", "--force")
    assert "and proved" in result.out


def test_a_model_that_fails_at_2_and_not_at_1_is_not_proved_at_1(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    from onnxgrad_cli.execution.executor import Executor

    run = Executor.__call__

    def fails(self: Executor, feeds: Any, *given: Any) -> Any:
        if "label" in feeds and np.shape(feeds["label"])[0] > 1:
            raise RuntimeError("only one sample")
        return run(self, feeds, *given)

    monkeypatch.setattr(Executor, "__call__", fails)
    text = f"{HEAD} g (float[batch, 4] x) => (float[batch, 4] y) {{ a = MatMul(x, w) y = Tanh(a) }}"
    result = built(shell, model(text, w=(4, 4)))
    assert result.code == 4 and "runs: only one" in result.out + result.err


def test_signals_are_drawn_with_a_window_and_in_full_length(shell: Shell) -> None:
    """A shorter signal has no spectrum, of which onnxruntime's DFT ends the process; a masked one has no gradient."""
    text = f"""{HEAD} g (float[batch, samples] x, int64[batch] lengths) => (float[batch, frames, 4] y)
    <int64[1] first = {{0}}, int64[1] last = {{-1}}, int64 step = {{64}}, int64 size = {{64}},
     int64 none = {{0}}, int64 one = {{1}}, int64[1] second = {{1}}, float zero = {{0}}> {{
      u = Unsqueeze(x, last) f = STFT<onesided = 1>(u, step, window, size)
      p = ReduceSumSquare<axes = [3], keepdims = 0>(f) m = MatMul(p, w)
      s = Shape(p) n = Gather(s, one) r = Range(none, n, one) rows = Unsqueeze(r, first)
      spans = Div(lengths, size) columns = Unsqueeze(spans, second) inside = Less(rows, columns)
      mask = Unsqueeze(inside, last) y = Where(mask, m, zero)
    }}"""
    result = built(shell, model(text, w=(33, 4), window=(64,)))
    assert result.code == 0 and "proved: every" in result.out and "samples = 512" in result.out, result.out
