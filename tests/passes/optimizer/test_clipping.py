"""Gradients within bounds, beside torch.nn.utils: on all batches, on some, and on none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from onnx import helper, numpy_helper

from onnxgrad_cli.builder import build
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.options import Options
from tests.steps import KINDS, RATE, assert_same, batches, clip, exported, loss, network, options, trained


@pytest.mark.parametrize("given", [("clip_norm", 0.02), ("clip_norm", 0.3), ("clip_norm", 1e6), ("clip_value", 0.01)])
@pytest.mark.parametrize(("dtype", "bound"), KINDS)
@pytest.mark.thinned(2)
def test_beside_torch(given: tuple[str, float], dtype: str, bound: float) -> None:
    how, limit = given
    net = network(getattr(torch, dtype))
    data = batches(dtype)
    asked = options("momentum", {"weight_decay": 0.1}, **{how: limit})
    ours = trained(build(exported(net), asked).model, data)
    theirs = torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.9, weight_decay=0.1)
    for batch in data:
        theirs.zero_grad()
        loss(net, batch).backward()
        clip(net, **{how: limit})
        theirs.step()
    assert_same(ours, net, bound)


def test_the_norm_of_large_weights_loses_no_digits() -> None:
    """A step of length MAX, from gradients of a million elements."""
    weight = np.zeros((1000, 1000), np.float32)
    x, z = (helper.make_tensor_value_info(name, 1, ["n", 1000]) for name in "xz")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["z"])]
    graph = helper.make_graph(nodes, "large", [x], [z], [numpy_helper.from_array(weight, "w")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    rng = np.random.default_rng(0)
    batch = (rng.standard_normal((4, 1000)).astype(np.float32) * 1000, np.ones((4, 1000), np.float32))
    after = trained(build(model, Options(label="y", optimizer="sgd", clip_norm=1.0)).model, [batch], 1.0)
    np.testing.assert_allclose(np.linalg.norm(after["w"].astype(np.float64)), 1.0, rtol=1e-6)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"clip_norm": 0.0}, "`clip_norm=0.0`: expected a finite number above 0"),
        ({"clip_value": float("nan")}, "`clip_value=nan`: expected a finite number above 0"),
        ({"clip_norm": 1.0, "clip_value": 1.0}, "can't be combined"),
        ({"clip_norm": 1.0, "optimizer": ""}, "`clip_norm` requires an optimizer"),
    ],
)
def test_what_does_not_fit_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        build(exported(network(torch.float32)), Options(**{"optimizer": "sgd", **given}))
