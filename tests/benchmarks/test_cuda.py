"""The rows that are measured on a graphics card; no card is needed to make them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

pytest.importorskip("torch", reason="the benchmarks' networks are PyTorch modules")

from benchmarks import cuda
from benchmarks.workloads import chosen


def test_a_row_takes_another_batch_everywhere() -> None:
    row = cuda.resized(chosen(["gpt2"])[0], 8)
    assert row.name == "GPT-2 small, 8 x 128 tokens"
    assert {name: array.shape for name, array in row.batch().items()} == {"x": (8, 128), "y": (8 * 128,)}


def test_a_training_model_is_for_its_batch_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "CARD", "cpu")
    case = cuda.Case(cuda.resized(chosen(["lenet"])[0], 2), "float16", tmp_path)
    assert case.kinds == ("gradients",) and case.batch["x"].dtype == np.float16
    model = onnx.load(case.training_model("gradients"))
    assert [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim] == [2, 1, 28, 28]
