"""Control flow against PyTorch, whose loops are Python's, and what the pipeline makes of bodies."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence

import numpy as np
import onnx
import pytest
import torch
from onnx import NodeProto, helper, numpy_helper

from onnxgrad_cli.builder import build
from onnxgrad_cli.errors import UnsupportedError
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node_values import subgraphs
from onnxgrad_cli.ir.type_inference import infer_types
from onnxgrad_cli.ir.types import shape_of
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.prepare import prepare
from onnxgrad_cli.record import Training
from tests.autodiff.rows.control import BOOL, DOUBLE, INT64, node, scan, sequence, step, value
from tests.facts import raises
from tests.harness import with_gradient

Torch = torch.Tensor


def model(
    nodes: Sequence[NodeProto], shapes: dict[str, Sequence[int | str]], outputs: dict[str, Sequence[int | str]],
    constants: dict[str, np.ndarray] | None = None, opset: int = 18, ints: Sequence[str] = (), check: bool = True,
    bools: Sequence[str] = (),
) -> onnx.ModelProto:  # fmt: skip
    def info(name: str, shape: Sequence[int | str]) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, INT64 if name in ints else BOOL if name in bools else DOUBLE, shape)

    graph = helper.make_graph(
        nodes,
        "control",
        [info(*pair) for pair in shapes.items()],
        [info(*pair) for pair in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in (constants or {}).items()],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    if check:  # shape inference refuses a Scan of opset 8
        onnx.checker.check_model(made, full_check=True)
    return made


def compare(
    made: onnx.ModelProto,
    feeds: dict[str, np.ndarray],
    wanted: Sequence[str],
    function: Callable[..., tuple[Torch, ...]],
) -> None:
    """The gradient of every output, by random cotangents, against PyTorch's for `function(**feeds)`."""
    tensors = {name: torch.from_numpy(np.asarray(array)) for name, array in feeds.items()}
    for name in wanted:
        tensors[name].requires_grad_()
    results = function(**tensors)
    rng = np.random.default_rng(0)
    seeds = [rng.standard_normal(tuple(result.shape)) for result in results]
    torch.autograd.backward(results, [torch.from_numpy(seed) for seed in seeds])
    names = [output.name for output in made.graph.output]
    given = {f"g_{name}": seed for name, seed in zip(names, seeds, strict=True)}
    found = Executor(with_gradient(made, wanted, names, "g_"))({**feeds, **given})
    for name, result in zip(names, results, strict=True):
        np.testing.assert_allclose(found[name], result.detach(), rtol=1e-9, atol=1e-12)
    for name in wanted:
        np.testing.assert_allclose(found[f"g_grad_{name}"], tensors[name].grad, rtol=1e-8, atol=1e-10, err_msg=name)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


@pytest.mark.parametrize("steps", [1, 7, 200])
def test_a_loop_is_its_steps(steps: int, rng: np.random.Generator) -> None:
    made = model([step()], {"x0": [], "x1": ["n", 3], "x2": [3, 3]}, {"y0": ["n", 3], "y1": ["t", "n", 3]}, ints=["x0"])

    def unrolled(x0: Torch, x1: Torch, x2: Torch) -> tuple[Torch, ...]:
        s, squares = x1, []
        for _ in range(int(x0)):
            s = torch.tanh(s @ x2)
            squares.append(s * s)
        return s, torch.stack(squares)

    feeds = {"x0": np.array(steps), "x1": rng.standard_normal((2, 3)), "x2": rng.standard_normal((3, 3))}
    compare(made, feeds, ["x1", "x2"], unrolled)


@pytest.mark.parametrize("steps", [1, 7, 200])
@pytest.mark.parametrize("back", [0, 1])
def test_a_scan_is_its_steps(steps: int, back: int, rng: np.random.Generator) -> None:
    nodes = [scan(scan_input_directions=[back], scan_output_directions=[1 - back])]
    made = model(nodes, {"x0": ["n", 3], "x1": ["t", "n", 3], "x2": [3, 3]}, {"y0": ["n", 3], "y1": ["t", "n", 3]})

    def unrolled(x0: Torch, x1: Torch, x2: Torch) -> tuple[Torch, ...]:
        s, rows = x0, []
        for row in x1.flip(0) if back else x1:
            s = torch.tanh(s @ x2 + row)
            rows.append(row * s)
        return s, torch.stack(rows if back else rows[::-1])

    feeds = {"x0": (2, 3), "x1": (steps, 2, 3), "x2": (3, 3)}
    compare(made, {name: rng.standard_normal(shape) for name, shape in feeds.items()}, list(feeds), unrolled)


@pytest.mark.parametrize("back", [0, 1])
def test_a_scan_of_opset_8_goes_through_a_batch(back: int, rng: np.random.Generator) -> None:
    old = scan(directions=[back])
    old.input.insert(0, "")
    shapes = {"x0": [2, 4, 3], "x1": [2, 5, 4, 3], "x2": [3, 3]}
    made = model([old], shapes, {"y0": [2, 4, 3], "y1": [2, 5, 4, 3]}, opset=8, check=False)

    def unrolled(x0: Torch, x1: Torch, x2: Torch) -> tuple[Torch, ...]:
        s, rows = x0, []
        for row in (x1.flip(1) if back else x1).unbind(1):
            s = torch.tanh(s @ x2 + row)
            rows.append(row * s)
        return s, torch.stack(rows, 1)

    feeds = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    expected = [y.numpy() for y in unrolled(*(torch.from_numpy(x) for x in feeds.values()))]
    for found, right in zip(Executor(made)(feeds).values(), expected, strict=True):
        np.testing.assert_allclose(found, right)
    compare(settled(made).commit(), feeds, list(feeds), unrolled)


def test_a_loop_of_no_steps_passes_the_cotangent_on(rng: np.random.Generator) -> None:
    nodes = [step(), node("ReduceSum", ["y1"], ["y"], keepdims=0)]
    made = model(nodes, {"x0": [], "x1": ["n", 3], "x2": [3, 3]}, {"y0": ["n", 3], "y": []}, ints=["x0"])
    feeds = {"x0": np.array(0), "x1": rng.standard_normal((2, 3)), "x2": rng.standard_normal((3, 3))}
    g = rng.standard_normal((2, 3))
    found = Executor(with_gradient(made, ["x1", "x2"], ["y0", "y"], "g_"))({**feeds, "g_y0": g, "g_y": np.array(1.0)})
    np.testing.assert_array_equal(found["g_grad_x1"], g)
    np.testing.assert_array_equal(found["g_grad_x2"], np.zeros((3, 3)))


@pytest.mark.parametrize("limit", [0.1, 1.0, 1e9])
def test_how_often_a_loop_runs_may_depend_on_its_data(limit: float, rng: np.random.Generator) -> None:
    body = helper.make_graph(
        [
            node("MatMul", ["s", "w"], ["s2"]),
            node("ReduceL2", ["s2"], ["size"], keepdims=0),
            node("Less", ["size", "limit"], ["more"]),
        ],
        "body",
        [value("i", 0, INT64), value("c", 0, BOOL), value("s")],
        [value("more", 0, BOOL), value("s2")],
    )
    loop = node("Loop", ["most", "", "x"], ["y"], body=body)
    constants = {"most": np.array(12), "limit": np.array(limit)}
    made = model([loop], {"x": ["n", 3], "w": [3, 3]}, {"y": ["n", 3]}, constants)

    def unrolled(x: Torch, w: Torch) -> tuple[Torch, ...]:
        for _ in range(12):
            x = x @ w
            if torch.linalg.norm(x) >= limit:
                break
        return (x,)

    compare(made, {"x": rng.standard_normal((2, 3)), "w": rng.standard_normal((3, 3))}, ["x", "w"], unrolled)


def test_a_state_may_grow_where_its_cotangent_does_not_need_it(rng: np.random.Generator) -> None:
    body = helper.make_graph(
        [node("Concat", ["s", "x"], ["s2"], axis=0), node("Identity", ["c"], ["c2"])],
        "body",
        [value("i", 0, INT64), value("c", 0, BOOL), value("s")],
        [value("c2", 0, BOOL), value("s2")],
    )
    nodes = [node("Loop", ["k", "", "x"], ["all"], body=body), node("Mul", ["all", "all"], ["y"])]
    made = model(nodes, {"x": ["n", 3]}, {"y": ["m", 3]}, {"k": np.array(3)})
    compare(made, {"x": rng.standard_normal((2, 3))}, ["x"], lambda x: (torch.cat([x, x, x, x]) ** 2,))


def test_a_growing_state_that_is_needed_is_kept_in_a_sequence(rng: np.random.Generator) -> None:
    body = helper.make_graph(
        [node("Concat", ["s", "x"], ["t"], axis=0), node("Sin", ["t"], ["s2"]), node("Identity", ["c"], ["c2"])],
        "body",
        [value("i", 0, INT64), value("c", 0, BOOL), value("s")],
        [value("c2", 0, BOOL), value("s2")],
    )
    made = model([node("Loop", ["k", "", "x"], ["y"], body=body)], {"x": ["n", 3]}, {"y": ["m", 3]}, {"k": np.array(3)})

    def unrolled(x: Torch) -> tuple[Torch, ...]:
        s = x
        for _ in range(3):
            s = torch.sin(torch.cat([s, x]))
        return (s,)

    compare(made, {"x": rng.standard_normal((2, 3))}, ["x"], unrolled)


def test_a_sequence_that_is_needed_as_it_was_is_refused() -> None:
    body = helper.make_graph(
        [
            node("SequenceAt", ["q", "i"], ["e"]),
            node("Sin", ["e"], ["e2"]),
            node("SequenceInsert", ["q", "e2"], ["q2"]),
            node("Identity", ["c"], ["c2"]),
        ],
        "body",
        [value("i", 0, INT64), value("c", 0, BOOL), sequence("q")],
        [value("c2", 0, BOOL), sequence("q2")],
    )
    nodes = [
        node("SequenceConstruct", ["x"], ["first"]),
        node("Loop", ["k", "", "first"], ["list"], body=body),
        node("ConcatFromSequence", ["list"], ["y"], axis=0),
    ]
    made = model(nodes, {"x": ["n", 3]}, {"y": ["m", 3]}, {"k": np.array(3)})
    with raises(UnsupportedError, "refused", "list", "Loop", "q"):
        with_gradient(made, ["x"], ["y"], "g_")


def test_branches_may_return_different_shapes(rng: np.random.Generator) -> None:
    yes = helper.make_graph([node("Mul", ["x", "x"], ["a"])], "yes", [], [value("a")])
    no = helper.make_graph([node("ReduceSum", ["x", "first"], ["b"])], "no", [], [value("b")])
    nodes = [node("If", ["which"], ["y"], then_branch=yes, else_branch=no)]
    constants = {"first": np.array([0])}
    for which, function in ((True, lambda x: (x * x,)), (False, lambda x: (x.sum(0, keepdim=True),))):
        made = model(nodes, {"x": ["n", 3]}, {"y": ["m", 3]}, {**constants, "which": np.array(which)})
        compare(made, {"x": rng.standard_normal((2, 3))}, ["x"], function)


def test_what_a_dropout_in_a_loop_drew_is_kept(rng: np.random.Generator) -> None:
    body = helper.make_graph(
        [
            node("Dropout", ["s", "ratio", "on"], ["d", "mask"]),
            node("Sin", ["d"], ["s2"]),
            node("Identity", ["c"], ["c2"]),
        ],
        "body",
        [value("i", 0, INT64), value("c", 0, BOOL), value("s", 1)],
        [value("c2", 0, BOOL), value("s2", 1), value("mask", 1, BOOL)],
    )
    constants = {"k": np.array(2), "ratio": np.array(0.5), "on": np.array(True)}
    nodes = [node("Loop", ["k", "", "x"], ["y", "masks"], body=body)]
    made = model(nodes, {"x": [64]}, {"y": [64]}, constants)
    made.graph.output.append(helper.make_tensor_value_info("masks", BOOL, [2, 64]))
    x, g = rng.standard_normal(64), rng.standard_normal(64)
    found = Executor(with_gradient(made, ["x"], ["y"], "g_"))({"x": x, "g_y": g})
    first, second = found["masks"]
    once = np.sin(2 * x * first)
    assert 0 < np.sum(first) < 64
    np.testing.assert_allclose(found["y"], np.sin(2 * once * second))
    slope = np.cos(2 * once * second) * 2 * second * np.cos(2 * x * first) * 2 * first
    np.testing.assert_allclose(found["g_grad_x"], g * slope)


def test_weights_gather_their_gradient_in_a_state() -> None:
    """Nothing of the size of iterations times weights is kept, and the graph does not grow with the iterations."""
    graphs = {}
    for steps in (7, 200):
        shapes = {"x1": [2, 64], "x2": [64, 64]}
        made = model([step()], shapes, {"y0": [2, 64], "y1": [steps, 2, 64]}, {"x0": np.array(steps)})
        graphs[steps] = with_gradient(made, ["x1", "x2"], ["y0", "y1"], "g_")
    assert len(graphs[7].graph.node) == len(graphs[200].graph.node)
    view = Graph(graphs[200])
    infer_types(view)
    sizes = [np.prod([1, *(shape_of(view.types[name]) or ())]) for n in view.nodes for name in n.output if name]
    assert max(sizes) < 64 * 64 * 7


# -- what the pipeline makes of bodies ------------------------------------------------------------------------


SHAPES = {"x": ["n", 3]}, {"y": ["n", 3]}, {"k": np.array(2)}


def settled(made: onnx.ModelProto) -> Graph:
    graph = Graph(made)
    prepare.normalise(graph)
    prepare.infer_and_lower(graph, Training())
    return graph


def test_weights_in_bodies_are_trained() -> None:
    weight = numpy_helper.from_array(np.eye(3), "w")
    body = helper.make_graph(
        [
            node("MatMul", ["s", "w"], ["a"]),
            node("Constant", [], ["b"], value=numpy_helper.from_array(np.ones(3))),
            node("Add", ["a", "b"], ["s2"]),
            node("Identity", ["c"], ["c2"]),
        ],
        "body",
        [value("i", 0, INT64), value("c", 0, BOOL), value("s")],
        [value("c2", 0, BOOL), value("s2")],
        [weight],
    )
    nodes = [node("Loop", ["k", "", "x"], ["h"], body=body), node("Loop", ["k", "", "h"], ["y"], body=body)]
    built = build(model(nodes, {"x": ["n", 3]}, {"y": ["n", 3]}, {"k": np.array(2)}), Options())
    assert len(built.training.trained) == 4  # two bodies, each with a matrix and a bias of its own
    assert not built.training.not_trained
    loss, *gradients = Executor(built.model)({"x": np.ones((2, 3)), "label": np.zeros((2, 3))}).values()
    weights = [torch.eye(3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    biases = [torch.ones(3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    h = torch.ones(2, 3, dtype=torch.float64)
    for w, b in zip(weights, biases, strict=True):
        h = (h @ w + b) @ w + b
    torch.mean(h**2).backward()
    assert loss == 25.0  # (1 + 4) squared
    for found, right in zip(gradients, (weights[0], biases[0], weights[1], biases[1]), strict=True):
        np.testing.assert_allclose(found, right.grad)


def test_weights_of_bodies_in_bodies_are_hoisted_too(rng: np.random.Generator) -> None:
    """The nodes of a body are written anew where it has constants, and those of a body in it with them."""
    inner = [
        helper.make_graph([constant("v", np.full(3, factor)), node("Mul", ["x", "v"], ["a"])], "in", [], [value("a")])
        for factor in (3.0, 5.0)
    ]
    yes = helper.make_graph(
        [
            constant("b", np.ones(3)),
            node("If", ["deep"], ["d"], then_branch=inner[0], else_branch=inner[1]),
            node("Add", ["d", "b"], ["e"]),
        ],
        "yes",
        [],
        [value("e")],
    )
    no = helper.make_graph([node("Sin", ["x"], ["f"])], "no", [], [value("f")])
    made = model(
        [node("If", ["which"], ["y"], then_branch=yes, else_branch=no)], {"x": ["n", 3], "which": [], "deep": []},
        {"y": ["n", 3]}, bools=("which", "deep"),
    )  # fmt: skip
    built = build(made, Options())
    assert len(built.training.trained) == 3
    x = rng.standard_normal((2, 3))
    run = Executor(built.model, fallback=False)
    for deep, factor in ((True, 3.0), (False, 5.0)):
        got = run({"x": x, "which": np.array(True), "deep": np.array(deep), "label": np.zeros((2, 3))})
        y = 2 * (factor * x + 1) / 6
        gradients = [got[f"{name}_grad"] for name in built.training.trained]
        expected = [y.sum(0), (y * x).sum(0), np.zeros(3)]
        assert all(any(np.allclose(each, found) for found in gradients) for each in expected)


def constant(name: str, array: np.ndarray) -> NodeProto:
    return node("Constant", [], [name], value=numpy_helper.from_array(array))


def test_a_weight_in_a_body_keeps_its_name_and_its_role() -> None:
    values = {"scale": 1.5, "shift": 0.5, "mean": 0.1, "var": 0.9}
    body = helper.make_graph(
        [node("BatchNormalization", ["s", *values], ["s2"]), node("Identity", ["c"], ["c2"])],
        "body",
        [value("i", 0, INT64), value("c", 0, BOOL), value("s")],
        [value("c2", 0, BOOL), value("s2")],
        [numpy_helper.from_array(np.full(3, each), name) for name, each in values.items()],
    )
    made = model([node("Loop", ["k", "", "x"], ["y"], body=body)], *SHAPES)
    built = build(made, Options(train=("scale", "shift")))
    assert built.training.trained == ["scale", "shift"]
    built = build(model([node("Loop", ["k", "", "x"], ["y"], body=body)], *SHAPES), Options(mode="eval"))
    assert built.training.trained == ["scale", "shift"]
    assert {name: reason.split(" of ")[0] for name, reason in built.training.not_trained.items()} == {
        "mean": "running mean",
        "var": "running variance",
    }
    assert "BatchNormalization inside a subgraph does not change its mode" in str(built.training.cautions)


def test_a_branch_that_is_always_taken_takes_the_place_of_the_if() -> None:
    yes = helper.make_graph([node("Mul", ["x", "x"], ["a"])], "yes", [], [value("a")])
    no = helper.make_graph([node("Erf", ["x"], ["b"])], "no", [], [value("b")])
    nodes = [node("If", ["which"], ["y"], then_branch=yes, else_branch=no)]
    made = model(nodes, {"x": ["n", 3]}, {"y": ["n", 3]}, {"which": np.array(True)})
    assert [n.op_type for n in settled(made).nodes] == ["Mul", "Identity"]


def test_sequences_of_known_length_are_gone() -> None:
    each = helper.make_graph([node("Sin", ["e"], ["s"])], "each", [value("e")], [value("s")])
    nodes = [
        node("SplitToSequence", ["x", "two"], ["parts"], axis=0),
        node("SequenceMap", ["parts"], ["sines"], body=each),
        node("SequenceErase", ["sines", "one"], ["fewer"]),
        node("SequenceAt", ["fewer", "one"], ["last"]),
        node("SequenceInsert", ["fewer", "last"], ["more"]),
        node("ConcatFromSequence", ["more"], ["y"], axis=0),
    ]
    constants = {"two": np.array(2), "one": np.array(1)}
    made = model(nodes, {"x": [6, 3]}, {"y": [6, 3]}, constants)
    graph = settled(made)
    graph.remove_unused()
    assert {n.op_type for n in graph.nodes} == {"Split", "Sin", "Identity", "Concat"}
    x = np.random.default_rng(0).standard_normal((6, 3))
    np.testing.assert_allclose(Executor(graph.commit())({"x": x})["y"], np.sin(x[[0, 1, 4, 5, 4, 5]]))


def test_a_map_over_a_sequence_of_unknown_length_is_differentiated(rng: np.random.Generator) -> None:
    each = helper.make_graph([node("Mul", ["e", "w"], ["s"])], "each", [value("e")], [value("s")])
    nodes = [
        node("SplitToSequence", ["x", "two"], ["parts"], axis=0),
        node("SequenceMap", ["parts"], ["products"], body=each),
        node("ConcatFromSequence", ["products"], ["y"], axis=0),
    ]
    made = model(nodes, {"x": ["n", 3], "w": [3]}, {"y": ["n", 3]}, {"two": np.array(2)})
    feeds = {"x": rng.standard_normal((5, 3)), "w": rng.standard_normal(3)}
    compare(settled(made).commit(), feeds, ["x", "w"], lambda x, w: (x * w,))


def test_definitions_reach_into_bodies() -> None:
    body = helper.make_graph(
        [node("Attention", ["s", "x", "x"], ["s2"], q_num_heads=1, kv_num_heads=1), node("Identity", ["c"], ["c2"])],
        "body",
        [value("i", 0, INT64), value("c", 0, BOOL), value("s", 3)],
        [value("c2", 0, BOOL), value("s2", 3)],
    )
    loop = node("Loop", ["k", "", "x"], ["y"], body=body)
    made = model([loop], {"x": [1, 2, 4]}, {"y": [1, 2, 4]}, {"k": np.array(2)}, opset=23)
    (loop,) = settled(made).nodes
    assert "Attention" not in {n.op_type for graph in subgraphs(loop) for n in graph.node}


def test_a_sequence_that_grows_in_a_loop(rng: np.random.Generator) -> None:
    body = helper.make_graph(
        [node("Mul", ["s", "w"], ["s2"]), node("SequenceInsert", ["q", "s2"], ["q2"]), node("Identity", ["c"], ["c2"])],
        "body",
        [value("i", 0, INT64), value("c", 0, BOOL), value("s"), sequence("q")],
        [value("c2", 0, BOOL), value("s2"), sequence("q2")],
    )
    nodes = [
        node("SequenceEmpty", [], ["none"], dtype=DOUBLE),
        node("Loop", ["k", "", "x", "none"], ["last", "list"], body=body),
        node("ConcatFromSequence", ["list"], ["y"], axis=0, new_axis=1),
    ]
    made = model(nodes, {"x": ["n", 3], "w": [3]}, {"y": ["t", "n", 3]}, {"k": np.array(3)})
    feeds = {"x": rng.standard_normal((2, 3)), "w": rng.standard_normal(3)}
    compare(made, feeds, ["x", "w"], lambda x, w: (torch.stack([x * w, x * w**2, x * w**3]),))


# -- what has been wrong ----------------------------------------------------------------------------------------


def branch(last: NodeProto, rank: int = 2) -> onnx.GraphProto:
    """The branch of one node."""
    return helper.make_graph([last], "branch", [], [value(last.output[0], rank)])


@pytest.mark.parametrize("which", [True, False])
def test_two_ifs_of_one_condition_are_two(which: bool, rng: np.random.Generator) -> None:
    nodes = [
        node(
            "If",
            ["q"],
            ["a"],
            then_branch=branch(node("Mul", ["x", "w"], ["p"])),
            else_branch=branch(node("Sin", ["x"], ["s"])),
        ),
        node(
            "If",
            ["q"],
            ["b"],
            then_branch=branch(node("Mul", ["x", "v"], ["r"])),
            else_branch=branch(node("Sin", ["x"], ["c"])),
        ),
        node("Mul", ["a", "b"], ["y"]),
    ]
    made = model(nodes, {"x": ["n", 3], "w": [3], "v": [3]}, {"y": ["n", 3]}, {"q": np.array(which)})
    feeds = {"x": rng.standard_normal((2, 3)), "w": rng.standard_normal(3), "v": rng.standard_normal(3)}

    def chosen(x: Torch, w: Torch, v: Torch) -> tuple[Torch, ...]:
        return (x * w * x * v if which else torch.sin(x) ** 2 + 0 * (w + v),)

    compare(made, feeds, ["x", "w", "v"], chosen)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_two_growing_states_are_kept_apart(steps: int, rng: np.random.Generator) -> None:
    body = helper.make_graph(
        [
            node("Concat", ["s", "x"], ["a"], axis=0),
            node("Sin", ["a"], ["s2"]),
            node("Concat", ["t", "z", "z"], ["b"], axis=0),
            node("Cos", ["b"], ["t2"]),
            node("Identity", ["c"], ["c2"]),
        ],
        "body",
        [value("i", 0, INT64), value("c", 0, BOOL), value("s"), value("t")],
        [value("c2", 0, BOOL), value("s2"), value("t2")],
    )
    nodes = [node("Loop", ["k", "", "x", "z"], ["y0", "y1"], body=body)]
    made = model(nodes, {"x": ["n", 3], "z": ["m", 3]}, {"y0": ["a", 3], "y1": ["b", 3]}, {"k": np.array(steps)})

    def unrolled(x: Torch, z: Torch) -> tuple[Torch, ...]:
        s, t = x, z
        for _ in range(steps):
            s, t = torch.sin(torch.cat([s, x])), torch.cos(torch.cat([t, z, z]))
        return s, t

    compare(made, {"x": rng.standard_normal((2, 3)), "z": rng.standard_normal((1, 3))}, ["x", "z"], unrolled)


@pytest.mark.parametrize("which", [True, False])
def test_a_branch_may_return_one_value_twice(which: bool, rng: np.random.Generator) -> None:
    yes = helper.make_graph([node("Sin", ["x"], ["a"])], "yes", [], [value("a"), value("a")])
    no = helper.make_graph([node("Cos", ["x"], ["b"]), node("Exp", ["x"], ["d"])], "no", [], [value("b"), value("d")])
    nodes = [node("If", ["q"], ["u", "v"], then_branch=yes, else_branch=no), node("Mul", ["u", "v"], ["y"])]
    made = settled(model(nodes, {"x": ["n", 3], "q": []}, {"y": ["n", 3]}, bools=["q"])).commit()
    result = (lambda x, q: (torch.sin(x) ** 2,)) if which else (lambda x, q: (torch.cos(x) * torch.exp(x),))
    compare(made, {"x": rng.standard_normal((2, 3)), "q": np.array(which)}, ["x"], result)


def test_a_scan_may_return_its_inputs(rng: np.random.Generator) -> None:
    body = helper.make_graph([], "body", [value("s", 1), value("t", 1), value("r", 1)], [])
    body.output.extend([value("t", 1), value("s", 1), value("r", 1), value("t", 1)])
    nodes = [node("Scan", ["x", "z", "rows"], ["y0", "y1", "y2", "y3"], body=body, num_scan_inputs=1)]
    shapes = {"x": [3], "z": [3], "rows": ["t", 3]}
    made = settled(model(nodes, shapes, {"y0": [3], "y1": [3], "y2": ["t", 3], "y3": ["t", 3]})).commit()
    feeds = {"x": rng.standard_normal(3), "z": rng.standard_normal(3), "rows": rng.standard_normal((3, 3))}
    compare(made, feeds, list(feeds), lambda x, z, rows: (z, x, rows, torch.stack([z, x, z])))


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_states_may_change_places(steps: int, rng: np.random.Generator) -> None:
    body = helper.make_graph(
        [node("Mul", ["s", "u"], ["s2"])],
        "body",
        [value("i", 0, INT64), value("c", 0, BOOL), value("s"), value("t"), value("u")],
        [value("c", 0, BOOL), value("t"), value("s2"), value("u")],
    )
    nodes = [node("Loop", ["k", "", "x", "z", "x"], ["y0", "y1", "y2"], body=body)]
    made = model(
        nodes, {"x": ["n", 3], "z": ["n", 3]}, {y: ["n", 3] for y in ("y0", "y1", "y2")}, {"k": np.array(steps)}
    )

    def unrolled(x: Torch, z: Torch) -> tuple[Torch, ...]:
        s, t = x, z
        for _ in range(steps):
            s, t = t, s * x
        return s, t, x + 0

    graph = settled(made)
    assert [len(shape_of(graph.types[y]) or ()) for y in ("y0", "y1", "y2")] == [2, 2, 2]
    feeds = {"x": rng.standard_normal((2, 3)), "z": rng.standard_normal((2, 3))}
    compare(graph.commit(), feeds, ["x", "z"], unrolled)


@pytest.mark.parametrize("which", [True, False])
def test_the_symbols_of_a_body_are_its_own(which: bool, rng: np.random.Generator) -> None:
    """The branches call 'n' a size that is another one outside."""
    nodes = [node("Reshape", ["x", "shape"], ["flat"]), node("Slice", ["flat", "zero", "one", "zero"], ["part"])]
    part = helper.make_graph(nodes, "part", [], [helper.make_tensor_value_info("part", DOUBLE, ["n", 3])])
    chosen = node("If", ["q"], ["first"], then_branch=part, else_branch=part)
    body = helper.make_graph(
        [chosen, node("Identity", ["c"], ["c2"])],
        "body",
        [value("i", 0, INT64), value("c", 0, BOOL)],
        [value("c2", 0, BOOL), value("first")],
    )
    nodes = [node("Loop", ["k", ""], ["all"], body=body), node("Mul", ["all", "x"], ["p"]), node("Sin", ["p"], ["y"])]
    made = model(
        nodes, {"x": ["n", 3], "shape": [2], "one": [1], "q": []}, {"y": ["t", "m", 3]},
        {"zero": np.array([0]), "k": np.array(2)}, ints=["shape", "one"], bools=["q"],
    )  # fmt: skip
    feeds = {"x": rng.standard_normal((4, 3)), "shape": np.array([4, 3]), "one": np.array([1]), "q": np.array(which)}

    def unrolled(x: Torch, shape: Torch, one: Torch, q: Torch) -> tuple[Torch, ...]:
        return (torch.sin(torch.stack([x[:1], x[:1]]) * x),)

    compare(settled(made).commit(), feeds, ["x"], unrolled)


def test_what_onnx_has_counted_in_two_models_is_not_one_size(rng: np.random.Generator) -> None:
    """Each part of a merged model has its own 'unk__0'."""
    nodes = [
        *(node("Slice", ["x", "zero", count, "zero"], [name]) for count, name in (("one", "a"), ("four", "b"))),
        node("Mul", ["a", "b"], ["p"]),
        node("Sin", ["p"], ["y"]),
    ]
    constants = {"zero": np.array([0])}
    made = model(nodes, {"x": ["n", 3], "one": [1], "four": [1]}, {"y": ["m", 3]}, constants, ints=["one", "four"])
    for name in ("a", "b"):
        made.graph.value_info.append(helper.make_tensor_value_info(name, DOUBLE, ["unk__0", "unk__1"]))
    feeds = {"x": rng.standard_normal((4, 3)), "one": np.array([1]), "four": np.array([4])}
    compare(settled(made).commit(), feeds, ["x"], lambda x, one, four: (torch.sin(x[:1] * x),))


def test_what_we_have_counted_in_two_models_is_not_one_size(rng: np.random.Generator) -> None:
    """Sizes without a name get symbols of ours, '_d1' and so on, in each of two models that are merged then."""
    made = model([node("Mul", ["x", "z"], ["y"])], {"x": ["_d1"], "z": ["_d1"]}, {"y": ["_d1"]}, {})
    feeds = {"x": rng.standard_normal(1), "z": rng.standard_normal(4)}
    compare(settled(made).commit(), feeds, ["x", "z"], lambda x, z: (x * z,))


class Leaps(torch.nn.Module):
    """A loop with `continue` and `break`, which PyTorch's exporter writes as Ifs that return numbers of rank 0 in place
    of what a branch leaves out, under the rank of what it does not, and one value twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x: Torch, limit: Torch) -> Torch:
        total = torch.zeros_like(x)
        for i in range(6):
            if i % 2 == 1:
                continue
            x = torch.tanh(self.linear(x))
            total = total + x * float(i)
            if bool(total.abs().max() > limit):
                break
        return total


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("limit", [0.0, 1.0, 9.0])
def test_leaps_in_a_loop(limit: float, rng: np.random.Generator) -> None:
    torch.manual_seed(0)
    module, file = Leaps(), io.BytesIO()
    example = (torch.zeros(2, 3, dtype=torch.float64), torch.tensor(limit, dtype=torch.float64))
    names = {"input_names": ["x", "limit"], "output_names": ["y"], "dynamic_axes": {"x": {0: "n"}}}
    torch.onnx.export(torch.jit.script(module), example, file, opset_version=17, dynamo=False, **names)
    made = settled(onnx.load_from_string(file.getvalue())).commit()
    feeds = {"x": rng.standard_normal((2, 3)), "limit": np.array(limit)}
    compare(made, feeds, ["x"], lambda x, limit: (module(x, limit),))
