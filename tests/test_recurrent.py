"""LSTM, GRU and RNN against PyTorch's autograd over the operator pages' equations, written as a loop in float64.

The forward values of that loop are compared with onnxruntime's first, so it is the operator that is differentiated.
"""

import itertools

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper

from onnxgrad_cli.errors import UnsupportedError
from onnxgrad_cli.executor import Executor
from tests.harness import with_gradient

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
NAMES = ("x", "w", "r", "b", "lens", "h", "c", "p")
STEPS, BATCH, SIZE, UNITS = 6, 4, 3, 5
LENGTHS = np.array([6, 2, 0, 3], np.int32)
sig = torch.sigmoid


def lstm_step(v, xt, h, c, d):
    wb, rb = v["b"][d].chunk(2)
    i, o, f, g = (xt @ v["w"][d].T + h @ v["r"][d].T + wb + rb).chunk(4, -1)
    pi, po, pf = v["p"][d].chunk(3)
    i, f = sig(i + pi * c), sig(f + pf * c)
    c = f * c + i * torch.tanh(g)
    return sig(o + po * c) * torch.tanh(c), c


def gru_step(v, xt, h, c, d, linear_before_reset=0):
    (wz, wr, wh), (rz, rr, rh) = v["w"][d].chunk(3), v["r"][d].chunk(3)
    wbz, wbr, wbh, rbz, rbr, rbh = v["b"][d].chunk(6)
    z = sig(xt @ wz.T + h @ rz.T + wbz + rbz)
    r = sig(xt @ wr.T + h @ rr.T + wbr + rbr)
    inner = r * (h @ rh.T + rbh) if linear_before_reset else (r * h) @ rh.T + rbh
    return (1 - z) * torch.tanh(xt @ wh.T + inner + wbh) + z * h, c


def rnn_step(v, xt, h, c, d, act=torch.tanh):
    wb, rb = v["b"][d].chunk(2)
    return act(xt @ v["w"][d].T + h @ v["r"][d].T + wb + rb), c


def loop(step, v, directions, lengths):
    """Y, Y_h, Y_c: steps beyond a sequence's end are zero, and so are the last states of an empty sequence."""
    ys, hs, cs = [], [], []
    for d, backwards in enumerate(directions):
        h, c = v["h"][d], v["c"][d]
        rows = [None] * STEPS
        for t in reversed(range(STEPS)) if backwards else range(STEPS):
            live = torch.tensor(t < lengths)[:, None]
            h_next, c_next = step(v, v["x"][t], h, c, d)
            h, c = torch.where(live, h_next, h), torch.where(live, c_next, c)
            rows[t] = torch.where(live, h_next, torch.zeros_like(h))
        some = torch.tensor(lengths > 0)[:, None]
        ys.append(torch.stack(rows))
        hs.append(h * some)
        cs.append(c * some)
    return torch.stack(ys, 1), torch.stack(hs), torch.stack(cs)


def values(op, directions, given, rng):
    d, n = directions, GATES[op]
    shapes = {
        "x": (STEPS, BATCH, SIZE), "w": (d, n * UNITS, SIZE), "r": (d, n * UNITS, UNITS), "b": (d, 2 * n * UNITS),
        "h": (d, BATCH, UNITS), "c": (d, BATCH, UNITS), "p": (d, 3 * UNITS),
    }  # fmt: skip
    feeds = {k: rng.uniform(-0.8, 0.8, s).astype(np.float32) for k, s in shapes.items()}
    for name in ("b", "h", "c", "p"):
        if name not in given:
            feeds[name] = np.zeros_like(feeds[name])
    return feeds


def layer(op, given, feeds, attributes, names, symbolic):
    inputs = [n for n in NAMES if n in ("x", "w", "r") or n in given]
    slots = [n if n in inputs else "" for n in NAMES[: 8 if op == "LSTM" else 6]]
    infos = []
    for name in inputs:
        shape = [BATCH] if name == "lens" else feeds[name].shape
        dims = [f"{name}{k}" for k in range(len(shape))] if symbolic and name in ("x", "lens", "h", "c") else shape
        infos.append(helper.make_tensor_value_info(name, TensorProto.INT32 if name == "lens" else 1, dims))
    node = helper.make_node(op, slots, names, name="layer", hidden_size=UNITS, **attributes)
    ranks = {"y": 4, "y_h": 3, "y_c": 3}
    outputs = [helper.make_tensor_value_info(n, 1, [None] * ranks[n]) for n in names if n]
    graph = helper.make_graph([node], "layer", infos, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), inputs


def compare(op, step, given, direction, attributes, seeded, names=None, symbolic=False):
    rng = np.random.default_rng(5)
    directions = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[direction]
    feeds = values(op, len(directions), given, rng)
    lengths = LENGTHS if "lens" in given else np.full(BATCH, STEPS)
    names = names or ["y", "y_h", "y_c"][: 3 if op == "LSTM" else 2]
    model, inputs = layer(op, given, feeds, {"direction": direction, **attributes}, names, symbolic)
    fed = {n: LENGTHS if n == "lens" else feeds[n] for n in inputs}
    wanted = [n for n in inputs if n != "lens"]

    leaves = {k: torch.tensor(v, dtype=torch.float64, requires_grad=True) for k, v in feeds.items()}
    outputs = dict(zip(("y", "y_h", "y_c"), loop(step, leaves, directions, lengths), strict=True))
    seeds = {n: rng.standard_normal(tuple(outputs[n].shape)).astype(np.float32) for n in seeded}
    sum((outputs[n] * torch.tensor(s)).sum() for n, s in seeds.items()).backward()

    for name, value in Executor(model, fallback=False)(fed).items():
        np.testing.assert_allclose(value, outputs[name].detach(), atol=2e-6)
    backward = with_gradient(model, wanted, list(seeds), "g_")
    found = Executor(backward, fallback=False)({**fed, **{f"g_{n}": s for n, s in seeds.items()}})
    for name in wanted:
        gradient = found[f"g_grad_{name}"]
        expected = leaves[name].grad
        expected = np.zeros_like(gradient) if expected is None else expected.numpy()
        assert gradient.shape == expected.shape
        assert np.abs(gradient - expected).max() <= 3e-6 * max(np.abs(expected).max(), 1e-2), name


DIRECTIONS = ("forward", "reverse", "bidirectional")
OPTIONAL = ((), ("b",), ("b", "lens"), ("b", "h"), ("b", "lens", "h"))
SEEDS = (("y",), ("y_h",), ("y", "y_h"))


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize(("direction", "given"), list(itertools.product(DIRECTIONS, OPTIONAL)))
def test_lstm(direction, given, symbolic):
    for more in ((), ("c",), ("h", "c", "p")):
        for seeded in (*SEEDS, ("y_c",), ("y", "y_h", "y_c")):
            compare("LSTM", lstm_step, {*given, *more}, direction, {}, seeded, symbolic=symbolic)


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize(("direction", "given"), list(itertools.product(DIRECTIONS, OPTIONAL)))
def test_gru(direction, given, before):
    for seeded, symbolic in itertools.product(SEEDS, (False, True)):
        compare("GRU", lambda *a: gru_step(*a, linear_before_reset=before), given, direction,
                {"linear_before_reset": before}, seeded, symbolic=symbolic)  # fmt: skip


@pytest.mark.parametrize(("direction", "given"), list(itertools.product(DIRECTIONS, OPTIONAL)))
def test_rnn(direction, given):
    for seeded, symbolic in itertools.product(SEEDS, (False, True)):
        compare("RNN", rnn_step, given, direction, {}, seeded, symbolic=symbolic)


def test_rnn_with_relu():
    compare("RNN", lambda *a: rnn_step(*a, act=torch.relu), ("b",), "bidirectional",
            {"activations": ["Relu", "Relu"]}, ("y",))  # fmt: skip


@pytest.mark.parametrize(("op", "step"), [("LSTM", lstm_step), ("GRU", gru_step), ("RNN", rnn_step)])
def test_only_the_last_state_is_an_output(op, step):
    compare(op, step, ("b", "h"), "bidirectional", {}, ("y_h",), names=["", "y_h"])


@pytest.mark.parametrize("op", ["LSTM", "GRU", "RNN"])
def test_batch_first_equals_time_first(op):
    """onnxruntime has no layer with layout = 1, so the forward node is cut off and its output Y is fed."""
    rng = np.random.default_rng(2)
    feeds = values(op, 2, ("b", "h"), rng)
    attributes = {"direction": "bidirectional"}
    order = ["x", "w", "r", "b", "h"]
    model, _ = layer(op, ("b", "h"), feeds, attributes, ["y"], False)
    y = Executor(model, fallback=False)({n: feeds[n] for n in order})["y"]
    fed = {**{n: feeds[n] for n in order}, "y": y}
    fed["g_y"] = rng.standard_normal(y.shape).astype(np.float32)
    fed["g_y_h"] = rng.standard_normal((2, BATCH, UNITS)).astype(np.float32)
    found = {}
    for layout in (0, 1):
        moved = {n: to_batch_first(n, v) if layout else v for n, v in fed.items()}
        model, _ = layer(op, ("b", "h"), moved, {**attributes, "layout": layout}, ["y", "y_h"], False)
        backward = with_gradient(model, order, ["y", "y_h"], "g_")
        kept = [node for node in backward.graph.node if node.name != "layer"]
        del backward.graph.node[:]
        backward.graph.node.extend(kept)
        backward.graph.input.append(helper.make_tensor_value_info("y", 1, moved["y"].shape))
        del backward.graph.output[:]
        backward.graph.output.extend(helper.make_tensor_value_info(f"g_grad_{n}", 1, moved[n].shape) for n in order)
        result = Executor(backward, fallback=False)(moved)
        found[layout] = {n: result[f"g_grad_{n}"] for n in order}
    for name, value in found[0].items():
        np.testing.assert_allclose(found[1][name], to_batch_first(name, value), atol=3e-6, err_msg=name)


def to_batch_first(name, v):
    """A value of layout 0 in layout 1."""
    if name.endswith("y"):
        return np.ascontiguousarray(v.transpose(2, 0, 1, 3))
    return np.ascontiguousarray(v.swapaxes(0, 1)) if name.endswith(("x", "h")) else v


@pytest.mark.parametrize(
    ("op", "attributes", "reason"),
    [
        ("LSTM", {"clip": 1.0}, "clip=1.0"),
        ("LSTM", {"input_forget": 1}, "input_forget=1"),
        ("GRU", {"activations": ["Affine", "Tanh"]}, "activation Affine"),
        ("RNN", {"activations": ["LeakyRelu"], "activation_alpha": [0.3]}, "activation_alpha"),
    ],
)
def test_what_is_not_covered_is_refused_by_name(op, attributes, reason):
    feeds = values(op, 1, (), np.random.default_rng(0))
    model, inputs = layer(op, (), feeds, attributes, ["y"], False)
    with pytest.raises(UnsupportedError, match=reason):
        with_gradient(model, inputs, ["y"], "g_")
