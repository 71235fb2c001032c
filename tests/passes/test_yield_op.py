"""The marker between the forward and the backward part can stay, or become an input."""

from __future__ import annotations

import numpy as np
import pytest

from onnxgrad_cli.builder import build
from onnxgrad_cli.options import Options
from tests.passes.test_pipeline import LINEAR, parse, run


@pytest.mark.parametrize("choice", ["keep", "input"])
def test_the_marker_can_stay_or_become_an_input(choice: str) -> None:
    model = build(parse(LINEAR), Options(yield_=choice)).model
    kept = any(node.op_type == "YieldOp" for node in model.graph.node)
    assert kept == (choice == "keep")
    if choice == "input":
        x, t = np.ones((2, 3), np.float32), np.zeros((2, 2), np.float32)
        one = run(model, {"x": x, "label": t, "loss_grad": np.array(1, np.float32)})["w_grad"]
        three = run(model, {"x": x, "label": t, "loss_grad": np.array(3, np.float32)})["w_grad"]
        np.testing.assert_allclose(three, 3 * one)
