"""LSTM layers whose gates the forward part keeps, against PyTorch."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import ModelProto, helper, numpy_helper

from onnxgrad_cli import LossSpec, Options, build
from onnxgrad_cli.autodiff.rules import lstm_gates
from tests.autodiff.rules.test_recurrent import (
    DIRECTIONS,
    SEEDS,
    compare,
    lstm_step,
)


@pytest.fixture
def keeping(monkeypatch):
    """Every LSTM keeps its gates, however small."""
    monkeypatch.setattr(lstm_gates, "MIN_PRODUCTS_TO_KEEP_GATES", 0)


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize(("direction", "given"), list(itertools.product(DIRECTIONS, ((), ("b",), ("b", "h")))))
@pytest.mark.thinned(16, 4)
def test_lstm_that_keeps_its_gates(keeping, direction, given, symbolic):
    for more, seeded in itertools.product(((), ("c",)), (*SEEDS, ("y_c",), ("y", "y_h", "y_c"))):
        model = compare("LSTM", lstm_step, {*given, *more}, direction, {}, seeded, symbolic=symbolic)
        assert "LSTM" not in {node.op_type for node in model.graph.node}
    for names in (["", "y_h"], ["y"], ["", "", "y_c"]):
        compare("LSTM", lstm_step, given, direction, {}, [name for name in names if name], names, symbolic)


@pytest.mark.parametrize(
    ("given", "attributes"),
    [
        (("b", "lens"), {}),
        (("p",), {}),
        (("b",), {"clip": 0.7}),
        (("b",), {"input_forget": 1}),
    ],
)
def test_lstm_of_which_gates_are_not_kept(keeping, given, attributes):
    step = partial(lstm_step, clip=attributes.get("clip", 9.0), coupled="input_forget" in attributes)
    model = compare("LSTM", step, given, "forward", attributes, ("y", "y_h"))
    assert "LSTM" in {node.op_type for node in model.graph.node}


@pytest.mark.parametrize("units", [32, 128])
def test_gates_are_kept_where_products_are_dear(units):
    """The step of a layer of real size, 50 x 16 samples in float32, against PyTorch; training information, which leaves
    the inference graph as it is, keeps the operator."""
    batch = 16 if units == 128 else 1
    net = torch.nn.LSTM(units, units)
    x = torch.randn(50, batch, units, generator=torch.Generator().manual_seed(1), requires_grad=True)
    weights = {name.split("_l0")[0]: p.detach().numpy() for name, p in net.named_parameters()}
    w, r, *b = (np.concatenate([np.split(v, 4)[k] for k in (0, 3, 1, 2)]) for v in weights.values())
    arrays = {"w": w[None], "r": r[None], "b": np.concatenate(b)[None]}
    node = helper.make_node("LSTM", ["x", *arrays], ["y"], name="layer", hidden_size=units)
    graph = helper.make_graph(
        [node, helper.make_node("ReduceSumSquare", ["y"], ["z"], name="sum", keepdims=0)],
        "layer",
        [helper.make_tensor_value_info("x", 1, ["t", batch, units])],
        [helper.make_tensor_value_info("z", 1, [])],
        [numpy_helper.from_array(v, name) for name, v in arrays.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    kept = []
    for more in ({}, {"training_info": True}):
        options = Options(losses=(LossSpec("mae"),), grad_of_input=("x",), optimizer="sgd", **more)
        copy = ModelProto()
        copy.CopyFrom(model)
        built = build(copy, options)
        kept.append("LSTM" not in {each.op_type for each in built.model.graph.node})
        run = onnxruntime.InferenceSession(built.model.SerializeToString(), providers=["CPUExecutionProvider"])
        feeds = {"x": x.detach().numpy(), "label": np.float32(0), "learning_rate": np.float32(0)}
        fed = {v.name: np.asarray(feeds[v.name]) for v in run.get_inputs() if v.name in feeds}
        found = dict(zip([v.name for v in run.get_outputs()], run.run(None, fed), strict=True))
        x.grad = None
        (net(x)[0] ** 2).sum().backward()
        np.testing.assert_allclose(found["x_grad"], x.grad, atol=1e-5 * float(x.grad.abs().max()))
    assert kept == [units == 128, False]
