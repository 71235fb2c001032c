"""Selections against PyTorch: float64 as the second source, and float32 at real size on two threads, ten times.

onnxruntime's ScatterND(add) loses updates only at size and with threads, so small rows of the table can't see it.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from onnxgrad_cli.autodiff.reverse import differentiate
from onnxgrad_cli.cli import run
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.type_inference import infer_types
from onnxgrad_cli.ir.types import Arrays
from onnxgrad_cli.passes.prepare import prepare
from onnxgrad_cli.record import Training
from tests.harness import Case, const, fed, forward_model, sample, with_gradient

rng = np.random.default_rng(3)


def normal(*shape: int, dtype=np.float64) -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype)


def backward(case: Case, wanted: list[str], cotangent: np.ndarray, runs: int = 1) -> list[Arrays]:
    """The gradients of `wanted` through output 0, on two threads, once per run."""
    model = with_gradient(forward_model(case, symbolic=True), wanted, ["y0"], "g_")
    assert not any(n.op_type == "ScatterND" and a.s == b"add" for n in model.graph.node for a in n.attribute)
    run = Executor(model, threads=2)
    assert run.name.startswith("onnxruntime")
    feeds = {**fed(model, sample(case)), "g_y0": cotangent}
    return [{name: run(feeds)[f"g_grad_{name}"] for name in wanted} for _ in range(runs)]


def expected(function, arrays: list[np.ndarray], cotangent: np.ndarray) -> list[np.ndarray]:
    leaves = [torch.tensor(np.float64(array), requires_grad=True) for array in arrays]
    result = function(*leaves)
    assert result.shape == cotangent.shape
    gradients = torch.autograd.grad(result, leaves, torch.tensor(np.float64(cotangent)))
    return [gradient.numpy() for gradient in gradients]


def agree(found: np.ndarray, wanted: np.ndarray, tolerance: float) -> None:
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() <= tolerance * np.abs(wanted).max()


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.thinned(3)
def test_scatter_elements_at_real_size_with_threads(axis: int) -> None:
    data, updates = normal(64, 96, 128, dtype=np.float32), normal(64, 96, 128, dtype=np.float32)
    indices, g = rng.integers(0, 7, data.shape), normal(64, 96, 128, dtype=np.float32)
    wanted = expected(lambda x, u: x.scatter_add(axis, torch.tensor(indices), u), [data, updates], g)
    case = Case("ScatterElements", [data, indices, updates], {"axis": axis, "reduction": "add"})
    for found in backward(case, ["x0", "x2"], g, runs=3):
        for name, gradient in zip(("x0", "x2"), wanted, strict=True):
            agree(found[name], gradient, 1e-6)
    (wanted_data,) = expected(lambda x: x.gather(axis, torch.tensor(indices)), [data], g)
    for found in backward(Case("GatherElements", [data, indices], {"axis": axis}), ["x0"], g, runs=10):
        agree(found["x0"], wanted_data, 2e-6)


def graph_of(nodes: list, x: tuple, y: tuple, **more: tuple) -> onnx.ModelProto:
    """A model of some nodes from x, indices i [rows] and what is given besides to y0, each of a shape."""
    kinds = {"x": (TensorProto.DOUBLE, x), "i": (TensorProto.INT64, ("rows",))}
    kinds.update((name, (TensorProto.DOUBLE, shape)) for name, shape in more.items())
    inputs = [helper.make_tensor_value_info(name, *kind) for name, kind in kinds.items()]
    constants = [numpy_helper.from_array(np.array([1]), "one")]
    output = helper.make_tensor_value_info("y0", TensorProto.DOUBLE, y)
    graph = helper.make_graph(nodes, "graph", inputs, [output], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def operators(model: onnx.ModelProto) -> set[str]:
    return {node.op_type for node in model.graph.node}


@pytest.mark.parametrize("axis", [0, 1])
def test_elements_gathered_in_whole_rows(axis: int) -> None:
    """torch.gather with an expanded index; one with fewer columns than the data takes no whole rows."""
    for columns in (64, 63):
        nodes = [
            helper.make_node("Unsqueeze", ["i", "one"] if axis == 0 else ["i", "zero"], ["column"]),
            helper.make_node("Expand", ["column", "shape"], ["places"]),
            helper.make_node("GatherElements", ["x", "places"], ["y0"], name="gather", axis=axis),
        ]
        shape = [1200, columns] if axis == 0 else [columns, 1200]
        model = graph_of(nodes, (900, 64) if axis == 0 else (64, 900), tuple(shape))
        model.graph.input[1].type.tensor_type.shape.dim[0].dim_value = 1200
        constants = {"shape": np.array(shape), "zero": np.array([0])}
        model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
        training = with_gradient(model, ["x"], ["y0"], "g_")
        assert ("TopK" in operators(training)) == (axis == 0 and columns == 64)
        x, i, g = normal(*((900, 64) if axis == 0 else (64, 900))), rng.integers(0, 900, 1200), normal(*shape)
        index = torch.tensor(i)[:, None] if axis == 0 else torch.tensor(i)[None]
        whole = index.expand(shape).contiguous()  # PyTorch's own gradient of an expanded one is wrong at 63 columns
        (wanted,) = expected(lambda a, whole=whole: a.gather(axis, whole), [x], g)
        agree(Executor(training, threads=2)({"x": x, "i": i, "g_y0": g})["g_grad_x"], wanted, 1e-14)


def test_positions_in_order_are_put_back_at_once() -> None:
    table, g = normal(512, 64), normal(128, 64)
    for first in (0, 2, 384):
        case = Case("Gather", [table, const(np.arange(first, first + 128))])
        model = with_gradient(forward_model(case, symbolic=False), ["x0"], ["y0"], "g_")
        assert not operators(model) & {"TopK", "ScatterElements"}
        wanted = np.zeros_like(table)
        wanted[first : first + 128] = g
        agree(Executor(model)({"x0": table, "g_y0": g})["g_grad_x0"], wanted, 0.0)


def test_gather_nd_with_repeats_at_real_size_with_threads() -> None:
    data, g = normal(512, 32, 64, dtype=np.float32), normal(4096, 64, dtype=np.float32)
    indices = np.stack([rng.integers(0, 30, 4096), rng.integers(-32, 32, 4096)], 1)
    (wanted,) = expected(lambda x: x[tuple(torch.tensor(indices).T)], [data], g)
    for found in backward(Case("GatherND", [data, const(indices)]), ["x0"], g, runs=10):
        agree(found["x0"], wanted, 2e-6)


KINDS = {"max": "amax", "min": "amin", "mul": "prod"}


@pytest.mark.parametrize("reduction", KINDS)
def test_ties_and_zeros_of_a_scatter_are_as_in_pytorch(reduction: str) -> None:
    """Among -1, 0 and 1 ties are many, and so are products of which one factor is 0, or several."""
    data, updates = rng.integers(-1, 2, (9, 5)) * 1.0, rng.integers(-1, 2, (12, 5)) * 1.0
    indices, g = rng.integers(0, 9, (12, 5)), normal(9, 5)
    kind = KINDS[reduction]
    wanted = expected(lambda x, u: x.scatter_reduce(0, torch.tensor(indices), u, kind), [data, updates], g)
    case = Case("ScatterElements", [data, indices, updates], {"reduction": reduction})
    (found,) = backward(case, ["x0", "x2"], g)
    agree(found["x0"], wanted[0], 1e-14)
    agree(found["x2"], wanted[1], 1e-14)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("reduction", KINDS)
def test_scatter_nd_with_repeats_is_as_in_pytorch(reduction: str, depth: int) -> None:
    """PyTorch scatters along one axis, so the indexed axes are made one."""
    shape, indices = (3, 4, 2), rng.integers(0, 3, (7, depth))
    data = rng.integers(-1, 2, shape) * 1.0
    updates = rng.integers(-1, 2, (7, *shape[depth:])) * 1.0
    g = normal(*shape)
    rows = np.ravel_multi_index(tuple(indices.T), shape[:depth])

    def scattered(x: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        x, u = x.reshape(int(np.prod(shape[:depth])), -1), u.reshape(7, -1)
        places = torch.tensor(rows)[:, None].expand_as(u)
        return x.scatter_reduce(0, places, u, KINDS[reduction]).reshape(shape)

    wanted = expected(scattered, [data, updates], g)
    case = Case("ScatterND", [data, indices, updates], {"reduction": reduction})
    (found,) = backward(case, ["x0", "x2"], g)
    agree(found["x0"], wanted[0], 1e-14)
    agree(found["x2"], wanted[1], 1e-14)


@pytest.mark.parametrize(
    ("indices", "reduction", "told"),
    [
        (const([[0], [2]]), "add", False),
        (const([[0], [2]]), None, False),
        (np.array([[0], [2]]), None, False),
        (const([[0], [0]]), "add", True),
        (const([[0], [-4]]), "add", True),
        (np.array([[0], [2]]), "add", True),
        (np.array([[0], [2]]), "max", True),
    ],
    ids=str,
)
def test_a_scatter_that_loses_updates_is_told_of(indices, reduction: str | None, told: bool) -> None:
    """Whether indices may repeat is known of constants only; those that count from the end may equal others."""
    case = Case("ScatterND", [(4, 3), indices, (2, 3)], {"reduction": reduction} if reduction else {})
    graph = Graph(forward_model(case, symbolic=False))
    infer_types(graph)
    op, training = Op(graph), Training()
    differentiate(graph, {"y0": op.val("y0")}, ["x0"], op, training)
    assert [caution.subject for caution in training.cautions] == ["node"] * told


@pytest.mark.parametrize("case", [
    Case("Gather", [(300, 8), np.array([3, 3, -1])]),
    Case("Gather", [(20, 8), np.array([3, 3, -1])]),
    Case("GatherElements", [(5, 8), rng.integers(0, 5, (7, 8))]),
    Case("GatherND", [(300, 8), np.array([[3], [3], [-1]])]),
    Case("ScatterElements", [(5, 8), rng.integers(0, 5, (7, 8)), (7, 8)], {"reduction": "max"}),
], ids=str)  # fmt: skip
def test_half_precision_runs_where_the_operator_does(case: Case) -> None:
    """onnxruntime's ScatterElements has a kernel for float16 that fails whenever it is to add."""
    halves = [rng.standard_normal(x).astype(np.float16) if isinstance(x, tuple) else x for x in case.inputs]
    narrow, wide = (
        replace(case, inputs=[x.astype(kind) if x.dtype == np.float16 else x for x in halves])
        for kind in (np.float16, np.float64)
    )
    g = rng.standard_normal(Executor(forward_model(wide, False))(sample(wide))["y0"].shape).astype(np.float16)
    (found,) = backward(narrow, ["x0"], g)
    assert found["x0"].dtype == np.float16
    (wanted,) = backward(wide, ["x0"], g.astype(np.float64))
    agree(found["x0"].astype(np.float64), wanted["x0"], 2e-3)


@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("ordered", [0, 1])
def test_of_equal_elements_unique_takes_the_first(axis: int | None, ordered: int) -> None:
    x = np.array([[3.0, 1.0], [2.0, 1.0], [3.0, 1.0], [0.0, 0.0]])[:, [1, 0, 1]]
    attributes = {"sorted": ordered} if axis is None else {"sorted": ordered, "axis": axis}
    model = forward_model(Case("Unique", [x], attributes, outputs=4), symbolic=False)
    y, first = list(Executor(model)({"x0": x}).values())[:2]
    assert y.size < x.size
    g = normal(*y.shape)

    def taken(leaf: torch.Tensor) -> torch.Tensor:
        return leaf.reshape(-1)[torch.tensor(first)] if axis is None else leaf.index_select(axis, torch.tensor(first))

    (wanted,) = expected(taken, [x], g)
    agree(backward(Case("Unique", [x], attributes), ["x0"], g)[0]["x0"], wanted, 0.0)


@pytest.mark.parametrize("mode", ["linear", "circular"])
@pytest.mark.parametrize("axis", [1, 2, -1])
def test_a_cache_is_written_as_in_pytorch(axis: int, mode: str) -> None:
    past, shape = normal(3, 6, 7, 5), [3, 6, 7, 5]
    shape[axis] = 4
    update, g = normal(*shape), normal(3, 6, 7, 5)
    starts = np.array([0, 1, past.shape[axis] - (4 if mode == "linear" else 2)])

    def written(x: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        rows = (torch.tensor(starts)[:, None] + torch.arange(4)) % x.shape[axis]
        each = [x[b].index_copy(axis - 1 if axis > 0 else axis, rows[b], u[b]) for b in range(3)]
        return torch.stack(each)

    wanted = expected(written, [past, update], g)
    case = Case("TensorScatter", [past, update, starts], {"axis": axis, "mode": mode}, opset=24)
    (found,) = backward(case, ["x0", "x1"], g)
    agree(found["x0"], wanted[0], 0.0)
    agree(found["x1"], wanted[1], 0.0)


PADS = [(3, 2, 1, 0), (0, 0, 4, 4), (5, 6, 0, 1), (0, 0, 0, 0)]


@pytest.mark.parametrize("late", [False, True], ids=["known", "at run time"])
@pytest.mark.parametrize("pads", PADS, ids=str)
@pytest.mark.parametrize("mode", ["constant", "reflect", "edge", "wrap"])
def test_pad(mode: str, pads: tuple[int, ...], late: bool) -> None:
    x, kind = normal(2, 3, 7, 8), {"edge": "replicate", "wrap": "circular"}.get(mode, mode)
    begin_h, end_h, begin_w, end_w = pads
    order = np.array([0, 0, begin_h, begin_w, 0, 0, end_h, end_w])

    def padded(leaf: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(leaf, (begin_w, end_w, begin_h, end_h), kind)

    g = normal(*padded(torch.tensor(x)).shape)
    case = Case("Pad", [x, order if late else const(order)], {"mode": mode}, opset=19)
    agree(backward(case, ["x0"], g)[0]["x0"], expected(padded, [x], g)[0], 1e-14)


def test_cumsum_and_topk_at_real_size_with_threads() -> None:
    x = normal(32, 4096, dtype=np.float32)
    g = normal(32, 4096, dtype=np.float32)
    (wanted,) = expected(lambda leaf: leaf.cumsum(1), [x], g)
    agree(backward(Case("CumSum", [x, const(1)]), ["x0"], g)[0]["x0"], wanted, 1e-5)
    g = normal(32, 50, dtype=np.float32)
    (wanted,) = expected(lambda leaf: leaf.topk(50, 1).values, [x], g)
    for found in backward(Case("TopK", [x, const([50])], outputs=2), ["x0"], g, runs=3):
        agree(found["x0"], wanted, 0.0)


@pytest.mark.parametrize("step", [1, 2, 5])
def test_slices_at_real_size(step: int) -> None:
    x = normal(8, 197, 768, dtype=np.float32)
    g = normal(*x[:, 1:-3:step, 5::step].shape, dtype=np.float32)
    case = Case("Slice", [x, const([1, 5]), const([-3, 768]), const([1, 2]), const([step, step])])
    (wanted,) = expected(lambda leaf: leaf[:, 1:-3:step, 5::step], [x], g)
    agree(backward(case, ["x0"], g)[0]["x0"], wanted, 0.0)


def test_what_is_known_only_at_run_time() -> None:
    x, ends = normal(6, 5), np.array([-100, 4])
    case = Case("Slice", [x, np.array([-1, 0]), ends, np.array([1, 0]), np.array([-2, 3])])
    g = normal(2, 3)
    (wanted,) = expected(lambda leaf: leaf[0:4:3].flip(1)[:, ::2], [x], g)
    agree(backward(case, ["x0"], g)[0]["x0"], wanted, 0.0)
    x, g = normal(1, 1, 3, 5), normal(1, 1, 5, 9)
    (wanted,) = expected(lambda leaf: torch.nn.functional.pad(leaf, (3, 1, 1, 1), "reflect"), [x], g)
    case = Case("Pad", [x, np.array([3, 1, 1, 1]), None, np.array([-1, 2])], {"mode": "reflect"})
    agree(backward(case, ["x0"], g)[0]["x0"], wanted, 1e-14)


def test_how_many_axes_are_indexed_may_be_known_only_at_run_time() -> None:
    """Then the rank of the result is unknown too, unless the model declares it."""
    x, indices, g = normal(4, 3, 2), np.array([[1, 2], [1, 2], [-1, 0]]), normal(3, 2)
    (wanted,) = expected(lambda leaf: leaf[[1, 1, 3], [2, 2, 0]], [x], g)
    agree(backward(Case("GatherND", [x, indices]), ["x0"], g)[0]["x0"], wanted, 1e-14)
    for reduction in ("none", "add", "max", "min", "mul"):
        indices = indices[1:] if reduction == "none" else indices
        case = Case("ScatterND", [x, indices, normal(len(indices), 2)], {"reduction": reduction})
        static = with_gradient(forward_model(case, symbolic=False), ["x0", "x2"], ["y0"], "g_")
        late = with_gradient(forward_model(case, symbolic=True), ["x0", "x2"], ["y0"], "g_")
        feeds = {**sample(case), "g_y0": normal(4, 3, 2)}
        for name, value in Executor(static)(feeds).items():
            agree(Executor(late)(feeds)[name], value, 1e-14)


def test_a_piece_of_a_split_that_nobody_names() -> None:
    """Its size follows from the axis, which is known only at run time. (onnxruntime dies of such a node.)"""
    for size, count, opset in ((7, 3, 18), (6, 3, 18), (6, 2, 13)):
        x = normal(2, size)
        outputs = [f"y{i}" if i == 1 else "" for i in range(count)]
        more = {"num_outputs": count} if opset >= 18 else {}
        node = helper.make_node("Split", ["x"], outputs, name="node", axis=1, **more)
        vector = helper.make_tensor_value_info("x", TensorProto.DOUBLE, ["a", "b"])
        piece = helper.make_tensor_value_info("y1", TensorProto.DOUBLE, ["a", "c"])
        graph = helper.make_graph([node], "split", [vector], [piece])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
        chunk = -(-size // count)
        g = normal(*x[:, chunk : 2 * chunk].shape)
        run = Executor(with_gradient(model, ["x"], ["y1"], "g_"), "reference")
        found = run({"x": x, "g_y1": g})["g_grad_x"]
        wanted = np.zeros_like(x)
        wanted[:, chunk : 2 * chunk] = g
        agree(found, wanted, 0.0)
        whole = Graph(model)
        prepare.normalise(whole)
        (y,) = Executor(whole.commit())({"x": x}).values()
        agree(y, x[:, chunk : 2 * chunk], 0.0)


TABLE = 6


SCATTERS = {
    "ScatterElements": ("x, i, u", [7], "", [TABLE], [7]),
    "ScatterElements along axis 1": ("x, i, u", [2, 7], "<axis = 1>", [2, TABLE], [2, 7]),
    "rows": ("x, i, u", [7, 1], "", [TABLE, 3], [7, 3]),
    "single numbers": ("x, i, u", [7, 2], "", [TABLE, 4], [7]),
}
"""Operands, and the shapes of the indices, of the data and of the updates."""


def scatter_model(form: str, indices: np.ndarray, stored: bool, folder: Path, known: bool = True) -> Path:
    operands, _, attributes, data, updates = SCATTERS[form]
    op = "ScatterElements" if form.startswith("Scatter") else "ScatterND"
    sizes = {"i": indices.shape, "x": data, "u": updates, "y": data}
    shown = {
        name: list(size) if known else [f"{name}{axis}" for axis in range(len(size))] for name, size in sizes.items()
    }
    shown = {name: ", ".join(map(str, size)) for name, size in shown.items()}
    fed = "" if stored else f"int64[{shown['i']}] i, "
    text = f"""
    <ir_version: 10, opset_import: ["" : 18]>
    g ({fed}float[{shown["x"]}] x, float[{shown["u"]}] u) => (float[{shown["y"]}] y)
    {{ y = {op} {attributes} ({operands}) }}
    """
    made = onnx.parser.parse_model(text)
    if stored:
        made.graph.initializer.append(onnx.numpy_helper.from_array(indices, "i"))
    onnx.save(made, folder / "model.onnx")
    return folder / "model.onnx"


@pytest.mark.parametrize("known", [True, False], ids=["sizes", "symbols"])
@pytest.mark.parametrize("stored", [True, False], ids=["stored", "fed"])
@pytest.mark.parametrize("form", SCATTERS)
def test_the_update_that_stays_has_the_gradient(form: str, stored: bool, known: bool, tmp_path: Path) -> None:
    _, shape, _, data, updates = SCATTERS[form]
    rng = np.random.default_rng(3)
    indices = rng.integers(-2, 3, shape)  # of which several name one place, from the front or from the end
    made = tmp_path / "made.onnx"
    source = scatter_model(form, indices, stored, tmp_path, known)
    assert run(["derive", str(source), "--kind", "vjp", "--no-verify", "-o", str(made)]) == 0
    x, u, g = (np.float32(rng.standard_normal(size)) for size in (data, updates, data))
    given = {} if stored else {"i": indices}
    got = onnxruntime.InferenceSession(made).run(["x_grad", "u_grad"], {**given, "x": x, "u": u, "y_grad": g})
    forward = onnxruntime.InferenceSession(source)
    for name, array, gradient in (("x", x, got[0]), ("u", u, got[1])):
        for position in np.ndindex(array.shape):  # linear, so that a difference is a derivative
            moved = array.copy()
            moved[position] += 1
            pair = [forward.run(None, {**given, "x": x, "u": u, name: each})[0] for each in (moved, array)]
            difference = np.sum((pair[0] - pair[1]) * g)
            np.testing.assert_allclose(gradient[position], difference, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_many_updates_of_few_places_with_several_threads(tmp_path: Path) -> None:
    """ScatterElements keeps the last one at any size, with any number of threads."""
    text = """
    <ir_version: 10, opset_import: ["" : 18]>
    g (int64[N, 8] i, float[16, 8] x, float[N, 8] u) => (float[16, 8] y) { y = ScatterElements <axis = 0> (x, i, u) }
    """
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    made = tmp_path / "made.onnx"
    assert run(["derive", str(tmp_path / "model.onnx"), "--wrt", "u", "--no-verify", "-o", str(made)]) == 0
    rng = np.random.default_rng(4)
    i, g = rng.integers(0, 16, (200_000, 8)), np.float32(rng.standard_normal((16, 8)))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 4
    x, u = np.zeros((16, 8), np.float32), np.float32(np.arange(i.size).reshape(i.shape))
    y = onnxruntime.InferenceSession(tmp_path / "model.onnx", options).run(None, {"i": i, "x": x, "u": u})[0]
    wanted = np.zeros_like(u)
    stayed = np.int64(y).ravel()  # each update is its own number
    wanted.reshape(-1)[stayed] = g.ravel()
    session = onnxruntime.InferenceSession(made, options)
    for _ in range(5):
        got = session.run(["u_grad"], {name: each for name, each in {"i": i, "x": x, "u": u, "y_grad": g}.items()
                                       if name in {value.name for value in session.get_inputs()}})[0]  # fmt: skip
        np.testing.assert_array_equal(got, wanted)


def test_repeated_indices_of_a_scatter_that_has_no_order_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = """
    <ir_version: 10, opset_import: ["" : 18]>
    g (float[N] x) => (float[4] y) <float[3] w = {1, 2, 3}, float[4] z = {0, 0, 0, 0}, int64[3, 1] i = {1, 2, 1}>
    { a = ScatterND (z, i, w) s = ReduceSum (x) y = Mul (a, s) }
    """
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    made = tmp_path / "made.onnx"
    assert run(["build", str(tmp_path / "model.onnx"), "--loss", "mse", "--label", "t", "-o", str(made)]) == 0
    assert "the gradient is that of the last one" in Path(f"{made}.report.md").read_text()
    assert "proved" in capsys.readouterr().out
