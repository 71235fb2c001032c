"""LSTM, GRU and RNN against PyTorch: its own layers in float64, and, for what those do not have, the operator pages'
equations written as a loop, whose values are compared with onnxruntime's first, so that it is the operator that is
differentiated. onnx.reference, on which tests/autodiff/rows/recurrent.py measures, is compared with onnxruntime too.
"""

import itertools
from functools import partial

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper

from onnxgrad_cli.errors import UnsupportedError
from onnxgrad_cli.execution.executor import Executor, to_double
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node_values import subgraphs
from onnxgrad_cli.ir.type_inference import infer_types
from onnxgrad_cli.ir.types import shape_of
from onnxgrad_cli.passes.prepare.normalise import normalise
from tests.autodiff.rows.recurrent import ACTIVATIONS, FUNCTIONS
from tests.facts import raises
from tests.harness import with_gradient

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
NAMES = ("x", "w", "r", "b", "lens", "h", "c", "p")
STEPS, BATCH, SIZE, UNITS = 6, 4, 3, 5
LENGTHS = np.array([6, 2, 0, 3], np.int32)
sig = torch.sigmoid


def lstm_step(v, xt, h, c, d, clip=9.0, coupled=False, f=sig, g=torch.tanh, outer=torch.tanh):
    wb, rb = v["b"][d].chunk(2)
    i, o, forget, cell = (xt @ v["w"][d].T + h @ v["r"][d].T + wb + rb).chunk(4, -1)
    pi, po, pf = v["p"][d].chunk(3)
    i = f((i + pi * c).clamp(-clip, clip))
    forget = 1 - i if coupled else f((forget + pf * c).clamp(-clip, clip))
    c = forget * c + i * g(cell.clamp(-clip, clip))
    return f((o + po * c).clamp(-clip, clip)) * outer(c), c


def gru_step(v, xt, h, c, d, linear_before_reset=0, clip=9.0, f=sig, g=torch.tanh):
    (wz, wr, wh), (rz, rr, rh) = v["w"][d].chunk(3), v["r"][d].chunk(3)
    wbz, wbr, wbh, rbz, rbr, rbh = v["b"][d].chunk(6)
    z = f((xt @ wz.T + h @ rz.T + wbz + rbz).clamp(-clip, clip))
    r = f((xt @ wr.T + h @ rr.T + wbr + rbr).clamp(-clip, clip))
    inner = r * (h @ rh.T + rbh) if linear_before_reset else (r * h) @ rh.T + rbh
    return (1 - z) * g((xt @ wh.T + inner + wbh).clamp(-clip, clip)) + z * h, c


def rnn_step(v, xt, h, c, d, clip=9.0, f=torch.tanh):
    wb, rb = v["b"][d].chunk(2)
    return f((xt @ v["w"][d].T + h @ v["r"][d].T + wb + rb).clamp(-clip, clip)), c


STEP = {"LSTM": lstm_step, "GRU": gru_step, "RNN": rnn_step}


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
    step = step or STEP[op]
    shaped = {n: to_batch_first(n, v) if attributes.get("layout") else v for n, v in feeds.items()}
    model, inputs = layer(op, given, shaped, {"direction": direction, **attributes}, names, symbolic)
    if attributes.get("layout"):
        graph = Graph(model)
        normalise(graph)
        model = graph.commit()
    fed = {n: LENGTHS if n == "lens" else feeds[n] for n in inputs}
    moved = to_batch_first if attributes.get("layout") else lambda name, v: v
    wanted = [n for n in inputs if n != "lens"]

    leaves = {k: torch.tensor(v, dtype=torch.float64, requires_grad=True) for k, v in feeds.items()}
    outputs = dict(zip(("y", "y_h", "y_c"), loop(step, leaves, directions, lengths), strict=True))
    seeds = {n: rng.standard_normal(tuple(outputs[n].shape)).astype(np.float32) for n in seeded}
    sum((outputs[n] * torch.tensor(s)).sum() for n, s in seeds.items()).backward()

    fed = {n: moved(n, v) for n, v in fed.items()}
    for name, value in Executor(model, fallback=False)(fed).items():
        np.testing.assert_allclose(value, moved(name, outputs[name].detach().numpy()), atol=2e-6)
    backward = with_gradient(model, wanted, list(seeds), "g_")
    found = Executor(backward, fallback=False)({**fed, **{f"g_{n}": moved(n, s) for n, s in seeds.items()}})
    for name in wanted:
        gradient = found[f"g_grad_{name}"]
        expected = leaves[name].grad
        expected = np.zeros_like(gradient) if expected is None else moved(name, expected.numpy())
        assert gradient.shape == expected.shape
        assert np.abs(gradient - expected).max() <= 3e-6 * max(np.abs(expected).max(), 1e-2), name
    return backward


DIRECTIONS = ("forward", "reverse", "bidirectional")
OPTIONAL = ((), ("b",), ("b", "lens"), ("b", "h"), ("b", "lens", "h"))
SEEDS = (("y",), ("y_h",), ("y", "y_h"))


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize(("direction", "given"), list(itertools.product(DIRECTIONS, OPTIONAL)))
@pytest.mark.thinned(24, 4)
def test_lstm(direction, given, symbolic):
    for more in ((), ("c",), ("h", "c", "p")):
        for seeded in (*SEEDS, ("y_c",), ("y", "y_h", "y_c")):
            compare("LSTM", lstm_step, {*given, *more}, direction, {}, seeded, symbolic=symbolic)


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize(("direction", "given"), list(itertools.product(DIRECTIONS, OPTIONAL)))
@pytest.mark.thinned(12, 4)
def test_gru(direction, given, before):
    for seeded, symbolic in itertools.product(SEEDS, (False, True)):
        compare("GRU", lambda *a: gru_step(*a, linear_before_reset=before), given, direction,
                {"linear_before_reset": before}, seeded, symbolic=symbolic)  # fmt: skip


@pytest.mark.parametrize(("direction", "given"), list(itertools.product(DIRECTIONS, OPTIONAL)))
@pytest.mark.thinned(6, 3)
def test_rnn(direction, given):
    for seeded, symbolic in itertools.product(SEEDS, (False, True)):
        compare("RNN", rnn_step, given, direction, {}, seeded, symbolic=symbolic)


OTHERS = {
    "LSTM": (["LeakyRelu", "Affine", "ScaledTanh"], [0.3, 0.6, 0.2], [0.5, 0.8], {
        "f": lambda z: torch.where(z >= 0, z, 0.3 * z), "g": lambda z: 0.6 * z + 0.5,
        "outer": lambda z: 0.2 * torch.tanh(0.8 * z)}),
    "GRU": (["HardSigmoid", "Elu"], [0.3, 0.6], [0.5], {
        "f": lambda z: (0.3 * z + 0.5).clamp(0, 1), "g": lambda z: torch.nn.functional.elu(z, 0.6)}),
    "RNN": (["ThresholdedRelu"], [0.3], [], {"f": lambda z: torch.where(z > 0.3, z, 0)}),
}  # fmt: skip
"""Activations, their alphas and betas in the order of those that have some, and what that comes to."""


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("op", GATES)
def test_activations_with_parameters(op, direction):
    *given, functions = OTHERS[op]
    times = 2 if direction == "bidirectional" else 1
    keys = ("activations", "activation_alpha", "activation_beta")
    attributes = {key: values * times for key, values in zip(keys, given, strict=True) if values}
    compare(op, partial(STEP[op], **functions), ("b", "lens", "h"), direction, attributes, ("y", "y_h"))


@pytest.mark.parametrize(
    ("op", "direction", "given", "options"),
    [
        *(("LSTM", d, ("b", "lens", "h", "c", "p"), {"coupled": c}) for d in DIRECTIONS for c in (False, True)),
        ("LSTM", "forward", (), {"coupled": True}),
        *(("GRU", d, ("b", "lens", "h"), {"linear_before_reset": b}) for d in DIRECTIONS for b in (0, 1)),
        *(("RNN", d, ("b", "lens", "h"), {}) for d in DIRECTIONS),
    ],
)
@pytest.mark.thinned(6, 3)
def test_clip(op, direction, given, options):
    for clip in (0.3, 0.7):
        renamed = {"input_forget" if name == "coupled" else name: int(value) for name, value in options.items()}
        step = partial(STEP[op], clip=float(np.float32(clip)), **options)
        compare(op, step, given, direction, {"clip": clip, **renamed}, ("y", "y_h"))


@pytest.mark.parametrize("given", [(), ("b", "lens", "h", "c", "p")])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.thinned(3)
def test_input_forget(direction, given):
    compare("LSTM", partial(lstm_step, coupled=True), given, direction, {"input_forget": 1}, ("y", "y_h", "y_c"))


def test_rnn_with_relu():
    compare("RNN", partial(rnn_step, f=torch.relu), ("b",), "bidirectional", {"activations": ["Relu", "Relu"]}, ("y",))


@pytest.mark.parametrize(
    ("op", "names"),
    [
        *((op, names) for op in GATES for names in (["y"], ["", "y_h"])),
        *(("LSTM", names) for names in (["", "", "y_c"], ["", "y_h", "y_c"], ["y", "", "y_c"])),
    ],
)
@pytest.mark.thinned(3)
def test_any_subset_of_the_outputs(op, names):
    """Where Y is no output the gradient needs it all the same: the layer hands it out, and is not computed twice."""
    given = ("b", "lens", "h", "c") if op == "LSTM" else ("b", "lens", "h")
    backward = compare(op, None, given, "bidirectional", {}, [name for name in names if name], names=names)
    assert [node.op_type for node in backward.graph.node].count(op) == 1


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("op", GATES)
@pytest.mark.thinned(3)
def test_batch_first(op, direction):
    """onnxruntime has no layer with layout = 1: `prepare` puts the layer between transposes."""
    for given in ((), ("b", "lens", "h"), *((("b", "lens", "h", "c", "p"),) if op == "LSTM" else ())):
        compare(op, None, given, direction, {"layout": 1}, ("y", "y_h"))
    compare(op, None, ("b", "h"), direction, {"layout": 1}, ("y_h",), names=["", "y_h"])


def to_batch_first(name, v):
    """A value of layout 0 in layout 1."""
    if name == "y":
        return np.ascontiguousarray(v.transpose(2, 0, 1, 3))
    return np.ascontiguousarray(v.swapaxes(0, 1)) if name in ("x", "h", "c", "y_h", "y_c") else v


ORDER = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2), "RNN": (0,)}
"""PyTorch's gates, i f g o and r z n, among ours, i o f c and z r h."""


def reordered(op, v):
    """One of our weights with its gates in PyTorch's order."""
    gates = np.split(np.asarray(v), GATES[op])
    return np.concatenate([gates[k] for k in ORDER[op]])


@pytest.mark.parametrize("steps", [1, 7, 200])
@pytest.mark.parametrize("op", GATES)
def test_pytorchs_own_layers_in_float64(op, steps):
    rng = np.random.default_rng(steps)
    n, batch, size, units = GATES[op], 2, 3, 4
    shapes = {
        "x": (steps, batch, size), "w": (2, n * units, size), "r": (2, n * units, units), "b": (2, 2 * n * units),
        "h": (2, batch, units), "c": (2, batch, units),
    }  # fmt: skip
    names = [k for k in shapes if k != "c" or op == "LSTM"]
    feeds = {k: rng.uniform(-1, 1, shapes[k]) for k in names}
    slots = ["x", "w", "r", "b", "", *names[4:]]
    extra = {"linear_before_reset": 1} if op == "GRU" else {}
    outputs = ["y", "y_h", "y_c"][: 3 if op == "LSTM" else 2]
    node = helper.make_node(op, slots, outputs, name="layer", hidden_size=units, direction="bidirectional", **extra)
    infos = [helper.make_tensor_value_info(k, TensorProto.DOUBLE, shapes[k]) for k in names]
    results = [helper.make_tensor_value_info(k, TensorProto.DOUBLE, [None] * (4 if k == "y" else 3)) for k in outputs]
    graph = helper.make_graph([node], "layer", infos, results)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)

    net = getattr(torch.nn, op)(size, units, bidirectional=True, dtype=torch.float64)
    for d, end in enumerate(("", "_reverse")):
        wb, rb = np.split(feeds["b"][d], 2)
        for name, v in (("weight_ih", feeds["w"][d]), ("weight_hh", feeds["r"][d]), ("bias_ih", wb), ("bias_hh", rb)):
            getattr(net, f"{name}_l0{end}").data = torch.tensor(reordered(op, v))
    leaves = {k: torch.tensor(feeds[k], requires_grad=True) for k in ("x", "h", "c") if k in feeds}
    y, last = net(leaves["x"], (leaves["h"], leaves["c"]) if op == "LSTM" else leaves["h"])
    values = {"y": y.reshape(steps, batch, 2, units).transpose(1, 2)}
    values.update(zip(outputs[1:], last if op == "LSTM" else [last], strict=True))
    seeds = {k: rng.standard_normal(tuple(v.shape)) for k, v in values.items()}
    sum((values[k] * torch.tensor(s)).sum() for k, s in seeds.items()).backward()

    backward = with_gradient(model, names, outputs, "g_")
    found = Executor(backward, prefer="reference")({**feeds, **{f"g_{k}": s for k, s in seeds.items()}})
    for k, v in values.items():
        np.testing.assert_allclose(found[k], v.detach(), rtol=1e-10, atol=1e-12)
    for k, leaf in leaves.items():
        close(found[f"g_grad_{k}"], leaf.grad.numpy())
    for d, end in enumerate(("", "_reverse")):
        wb, rb = np.split(found["g_grad_b"][d], 2)
        ours = {"weight_ih": found["g_grad_w"][d], "weight_hh": found["g_grad_r"][d], "bias_ih": wb, "bias_hh": rb}
        for name, v in ours.items():
            close(reordered(op, v), getattr(net, f"{name}_l0{end}").grad.numpy())


def close(found, expected):
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= 1e-10 * np.abs(expected).max()


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("op", GATES)
def test_what_stands_beyond_the_end_of_a_sequence_does_not_matter(op, direction):
    d = 2 if direction == "bidirectional" else 1
    feeds = values(op, d, ("b", "h"), np.random.default_rng(4))
    model, inputs = layer(op, ("b", "lens", "h"), feeds, {"direction": direction}, ["y", "y_h"], False)
    wanted = [name for name in inputs if name != "lens"]
    run = Executor(with_gradient(model, wanted, ["y", "y_h"], "g_"), fallback=False)
    fed = {name: LENGTHS if name == "lens" else feeds[name] for name in inputs}
    fed["g_y"] = np.ones((STEPS, d, BATCH, UNITS), np.float32)
    fed["g_y_h"] = np.ones((d, BATCH, UNITS), np.float32)
    beyond = np.arange(STEPS)[:, None] >= LENGTHS
    found = [run({**fed, "x": np.where(beyond[..., None], np.float32(value), feeds["x"])}) for value in (0, np.nan)]
    for name in wanted:
        np.testing.assert_array_equal(found[0][f"g_grad_{name}"], found[1][f"g_grad_{name}"], err_msg=name)
    assert not found[1]["g_grad_x"][beyond].any()


def all_nodes(graph):
    """The nodes of a graph and of the graphs in them."""
    for node in graph.node:
        yield node
        for inner in subgraphs(node):
            yield from all_nodes(inner)


@pytest.mark.parametrize("op", GATES)
def test_work_and_memory_are_linear_in_time(op):
    """As many nodes for 200 steps as for 1, and no value of the gradient has more than one axis of time."""
    counts = set()
    for steps in (1, 7, 200, "T"):
        n = GATES[op]
        shapes = {"x": [steps, 2, 3], "w": [1, n * 4, 3], "r": [1, n * 4, 4], "b": [1, 2 * n * 4]}
        infos = [helper.make_tensor_value_info(k, TensorProto.FLOAT, s) for k, s in shapes.items()]
        node = helper.make_node(op, list(shapes), ["y"], name="layer", hidden_size=4)
        results = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [steps, 1, 2, 4])]
        graph = helper.make_graph([node], "layer", infos, results)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
        backward = with_gradient(model, list(shapes), ["y"], "g_")
        counts.add(sum(node.op_type not in ("Reshape", "Expand", "Shape") for node in all_nodes(backward.graph)))
        if steps != "T":
            view = Graph(backward)
            infer_types(view)
            sizes = [int(np.prod(shape_of(t))) for t in view.types.values() if shape_of(t) is not None]
            assert max(sizes) <= steps * 2 * (n + 1) * 4 + max(n * 4 * 4, 8)
    assert len(counts) == 1


@pytest.mark.parametrize("op", GATES)
def test_half_precision_is_differentiated_in_float32(op):
    """200 steps in float16: the gradient is as near to that of the float64 layer as its own rounding allows."""
    rng = np.random.default_rng(1)
    n = GATES[op]
    shapes = {"x": (200, 2, 3), "w": (1, n * 4, 3), "r": (1, n * 4, 4), "b": (1, 2 * n * 4)}
    infos = [helper.make_tensor_value_info(k, TensorProto.FLOAT16, s) for k, s in shapes.items()]
    node = helper.make_node(op, list(shapes), ["y"], name="layer", hidden_size=4)
    results = [helper.make_tensor_value_info("y", TensorProto.FLOAT16, [200, 1, 2, 4])]
    graph = helper.make_graph([node], "layer", infos, results)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    feeds = {k: rng.uniform(-0.6, 0.6, s).astype(np.float16) for k, s in shapes.items()}
    feeds["g_y"] = rng.uniform(0, 1, (200, 1, 2, 4)).astype(np.float16)
    backward = with_gradient(model, list(shapes), ["y"], "g_")
    found = Executor(backward, fallback=False)(feeds)
    wide = with_gradient(to_double(model), list(shapes), ["y"], "g_")
    exact = Executor(wide, prefer="reference")({k: v.astype(np.float64) for k, v in feeds.items()})
    for k in shapes:
        gradient = found[f"g_grad_{k}"]
        assert gradient.dtype == np.float16
        expected = exact[f"g_grad_{k}"]
        assert np.abs(gradient - expected).max() <= 2e-3 * np.abs(expected).max(), k


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("op", GATES)
@pytest.mark.thinned(4)
def test_the_reference_computes_what_onnxruntime_does(op, seed):
    """Random attributes, inputs, outputs."""
    rng = np.random.default_rng(seed)

    def some(*names):
        return tuple(name for name in names if rng.random() < 0.5)

    direction = str(rng.choice(DIRECTIONS))
    times = 2 if direction == "bidirectional" else 1
    attributes = {"direction": direction}
    if some("activations"):
        attributes["activations"] = [str(name) for name in rng.choice(ACTIVATIONS, FUNCTIONS[op] * times)]
        attributes["activation_alpha"] = rng.uniform(0.1, 0.9, 6).tolist()
        attributes["activation_beta"] = rng.uniform(0.1, 0.9, 6).tolist()
    if some("clip"):
        attributes["clip"] = float(rng.uniform(0.1, 0.8))
    if some("switch") and op != "RNN":
        attributes["input_forget" if op == "LSTM" else "linear_before_reset"] = 1
    given = some("b", "lens", "h", *(("c", "p") if op == "LSTM" else ()))
    feeds = values(op, times, given, rng)
    names = [*some("y"), ""][:1] + ["y_h", "y_c"][: 2 if op == "LSTM" else 1]
    model, inputs = layer(op, given, feeds, attributes, names, False)
    fed = {name: LENGTHS if name == "lens" else feeds[name] for name in inputs}
    expected = Executor(model, fallback=False)(fed)
    wide = {name: v if name == "lens" else v.astype(np.float64) for name, v in fed.items()}
    found = Executor(to_double(model), prefer="reference")(wide)
    for name, value in expected.items():
        assert found[name].dtype == np.float64
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize(
    ("op", "attributes", "reason"),
    [
        ("LSTM", {"clip": 0.0}, ("clip", "0")),
        ("GRU", {"clip": -1.0}, ("clip", "-1")),
        ("GRU", {"activations": ["Affine", "Tanh"]}, ("Affine", "activation_alpha", "activation_beta")),
        ("LSTM", {"activations": ["Sigmoid", "ThresholdedRelu", "Tanh"]},
         ("ThresholdedRelu", "activation_alpha")),
        ("LSTM", {"activations": ["Elu", "ScaledTanh", "Tanh"], "activation_alpha": [0.5], "activation_beta": [0.5]},
         ("ScaledTanh", "activation_alpha")),
        ("RNN", {"activations": ["Swish"]}, ("Swish",)),
        ("LSTM", {"activations": ["Sigmoid", "Tanh"]}, ("2", "3")),
        ("RNN", {"layout": 1}, ("layout", "1")),
    ],
)  # fmt: skip
def test_what_is_not_covered_is_refused_by_name(op, attributes, reason):
    feeds = values(op, 1, (), np.random.default_rng(0))
    model, inputs = layer(op, (), feeds, attributes, ["y"], False)
    with raises(UnsupportedError, "refused", "layer", op, *reason):
        with_gradient(model, inputs, ["y"], "g_")
