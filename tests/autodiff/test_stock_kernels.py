"""Derivatives load and run in stock onnxruntime in every type in which the model itself does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from onnxgrad_cli.cli import run

torch = pytest.importorskip("torch")


def derived(folder: Path, text: str, kind: str = "vjp") -> onnxruntime.InferenceSession:
    """A session of the model that the command derives, which it proves too."""
    onnx.save(onnx.parser.parse_model(text), folder / "model.onnx")
    made = folder / "made.onnx"
    assert run(["derive", str(folder / "model.onnx"), "--kind", kind, "-o", str(made)]) == 0
    return onnxruntime.InferenceSession(made)


@pytest.mark.parametrize("size", [4, 5])
def test_maxima_in_float64_of_windows_that_do_not_overlap(size: int, tmp_path: Path) -> None:
    text = f"""
    <ir_version: 10, opset_import: ["" : 22]>
    g (double[N, 2, {size}, {size}] x) => (double[N, 2, 2, 2] y)
    {{ y = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (x) }}
    """
    rng = np.random.default_rng(0)
    x, g = rng.standard_normal((3, 2, size, size)), rng.standard_normal((3, 2, 2, 2))
    (got,) = derived(tmp_path, text).run(None, {"x": x, "y_grad": g})
    leaf = torch.tensor(x, requires_grad=True)
    torch.nn.functional.max_pool2d(leaf, 2).backward(torch.tensor(g))
    np.testing.assert_array_equal(got, leaf.grad.numpy())
