"""The search for data that a model takes."""

from __future__ import annotations

import time

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxgrad_cli.builder import build
from onnxgrad_cli.ir.types import Arrays
from onnxgrad_cli.metadata import describe
from onnxgrad_cli.options import Options
from onnxgrad_cli.verification.feeds import SEARCH, TRIES, DescribedModel, first_run


@pytest.mark.parametrize("seconds", [0.0, SEARCH / 2])
def test_a_search_ends_where_its_tries_take_long(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    now, tries = 0.0, list[Arrays]()
    monkeypatch.setattr(time, "process_time", lambda: now)
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 18]> g (float[n, m] x) => (float[n, m] y) { y = Mul(x, w) }""")
    model.graph.initializer.append(numpy_helper.from_array(np.ones(1, np.float32), "w"))
    training = build(model, Options(train=("w",))).model

    def fail(feeds: Arrays) -> Arrays:
        nonlocal now
        now += seconds
        tries.append(feeds)
        raise ValueError("it takes other sizes")

    with pytest.raises(ValueError, match="other sizes"):
        first_run(fail, DescribedModel(training, describe(training)), np.random.default_rng(0), {}, {})
    assert len(tries) == TRIES if seconds else len(tries) > TRIES
