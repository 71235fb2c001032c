"""Rows added at places that may repeat, against PyTorch: in float64, and at real size with two threads."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from onnxgrad_cli.derivatives.kinds import derive
from onnxgrad_cli.execution.executor import Executor
from tests.autodiff.rules.test_index import agree, backward, expected, graph_of, normal, operators
from tests.harness import Case, const, with_gradient

rng = np.random.default_rng(3)


def words(rows: int, count: int) -> np.ndarray:
    """Indices as in text: a few rows most of the time."""
    return np.minimum(rng.zipf(1.3, count) - 1, rows - 1)


@pytest.mark.parametrize(
    ("rows", "columns", "indices"),
    [
        pytest.param(30522, 768, words(30522, 1024).reshape(8, 128), marks=[pytest.mark.slow, pytest.mark.long]),
        (512, 768, rng.integers(0, 8, 1024)),
        (512, 768, -1 - rng.integers(0, 512, (4, 256))),
        (2, 768, rng.integers(0, 2, (8, 512))),
        (100, 64, rng.integers(-100, 100, 4096)),
    ],
    ids=["words of BERT", "many repeats", "from the end", "token types", "a small table"],
)
@pytest.mark.thinned(4)
def test_an_embedding_at_real_size_with_threads(rows: int, columns: int, indices: np.ndarray) -> None:
    table = normal(rows, columns, dtype=np.float32)
    g = normal(*indices.shape, columns, dtype=np.float32)
    (wanted,) = expected(lambda w: w[torch.tensor(indices)], [table], g)
    for static in (table, const(table, np.float32)):
        case = Case("Gather", [static, indices])
        for found in backward(case, ["x0"], g, runs=10):
            agree(found["x0"], wanted, 2e-6)


SIZES = [(1, 0), (5, 0), (0, 0), (1, 1), (7, 22), (7, 23), (7, 24), (400, 46), (3, 4600), (3000, 10), (512, 8192)]


@pytest.mark.parametrize("kind", ["any", "one", "ends"])
def test_rows_whose_number_is_known_at_run_time(kind: str) -> None:
    """They are sorted and added up in blocks of 23, so sums end in a block, at its end, and many blocks later."""
    model = graph_of([helper.make_node("Gather", ["x", "i"], ["y0"], name="gather")], ("nodes", 64), ("rows", 64))
    training = with_gradient(model, ["x"], ["y0"], "g_")
    assert "TopK" in operators(training)
    run = Executor(training, threads=2)
    for rows, count in SIZES:
        x, g = normal(rows, 64), normal(count, 64)
        drawn = {"any": rng.integers(-rows, max(rows, 1), count), "one": np.full(count, -1)}
        drawn["ends"] = np.where(np.arange(count) % 2, -rows, rows - 1)
        wanted = np.zeros_like(x)
        np.add.at(wanted, drawn[kind], g)
        for _ in range(3):
            np.testing.assert_allclose(run({"x": x, "i": drawn[kind], "g_y0": g})["g_grad_x"], wanted, atol=1e-12)


@pytest.mark.parametrize("columns", [1, 3, 64])
def test_a_sum_at_nodes_as_exporters_write_it(columns: int) -> None:
    """PyTorch's scatter_add with expanded indices, to whose shape the export cuts what is added."""
    nodes = [
        helper.make_node("Unsqueeze", ["i", "one"], ["column"]),
        helper.make_node("Shape", ["sent"], ["shape"]),
        helper.make_node("Expand", ["column", "shape"], ["places"]),
        helper.make_node("ScatterElements", ["x", "places", "sent"], ["sum"], name="sum", axis=-2, reduction="add"),
        helper.make_node("Mul", ["sum", "sum"], ["y0"], name="square"),
    ]
    model = graph_of(nodes, ("nodes", columns), ("nodes", columns), sent=("rows", columns))
    training = with_gradient(model, ["x", "sent"], ["y0"], "g_")
    assert not operators(training) & {"Expand", "GatherElements"}
    run, before = Executor(training, threads=2), Executor(model)
    for rows, count in SIZES:
        if rows == 0:
            continue
        x, sent, i = normal(rows, columns), normal(count, columns), rng.integers(-rows, rows, count)
        g = normal(rows, columns)
        found = run({"x": x, "i": i, "sent": sent, "g_y0": g})
        np.testing.assert_array_equal(found["y0"], before({"x": x, "i": i, "sent": sent})["y0"])
        index = torch.tensor(i % rows)[:, None].expand(count, columns)
        wanted = expected(lambda a, b, index=index: a.scatter_add(0, index, b) ** 2, [x, sent], g)
        np.testing.assert_allclose(found["g_grad_x"], wanted[0], atol=1e-9)
        np.testing.assert_allclose(found["g_grad_sent"], wanted[1], atol=1e-9)


EDGES = [(5, 3, 0), (1, 1, 1), (7, 9, 24), (400, 30, 46), (3, 60, 4600), (3000, 3000, 10), (512, 300, 8192)]


def message_passing() -> onnx.ModelProto:
    """Rows of s, taken by j, are added to those of x that i names; `y0` is the square."""
    nodes = [
        helper.make_node("Gather", ["s", "j"], ["sent"], name="send"),
        helper.make_node("Unsqueeze", ["i", "one"], ["column"]),
        helper.make_node("Shape", ["sent"], ["shape"]),
        helper.make_node("Expand", ["column", "shape"], ["places"]),
        helper.make_node("ScatterElements", ["x", "places", "sent"], ["sum"], name="sum", axis=0, reduction="add"),
        helper.make_node("Mul", ["sum", "sum"], ["y0"], name="square"),
    ]
    model = graph_of(nodes, ("nodes", 64), ("nodes", 64), s=("sources", 64))
    model.graph.input.append(helper.make_tensor_value_info("j", TensorProto.INT64, ["rows"]))
    return model


@pytest.mark.parametrize("kind", ["any", "one", "ends", "words"])
def test_rows_sent_along_edges_are_gathered_as_they_are_added_up(kind: str) -> None:
    """PyTorch's index_select and scatter_add: forward, backward; nodes of no edges, of one and of all."""
    training = with_gradient(message_passing(), ["x", "s"], ["y0"], "g_")
    assert "TopK" in operators(training) and not {"sent", "places"} & {n for m in training.graph.node for n in m.output}
    run = Executor(training, threads=2)
    for rows, sources, count in EDGES:
        x, s, g = normal(rows, 64), normal(sources, 64), normal(rows, 64)

        def drawn(size: int, count: int = count) -> np.ndarray:
            ends = np.where(np.arange(count) % 2, -size, size - 1)
            return {"any": rng.integers(-size, size, count), "one": np.full(count, -1), "ends": ends,
                    "words": words(size, count)}[kind]  # fmt: skip

        i, j = drawn(rows), drawn(sources)
        places, picks = torch.tensor(i % rows)[:, None].expand(count, 64), torch.tensor(j % sources)
        wanted = expected(lambda a, b, p=places, q=picks: a.scatter_add(0, p, b[q]) ** 2, [x, s], g)
        np.add.at(total := x.copy(), i, s[j])
        for _ in range(2):
            found = run({"x": x, "i": i, "s": s, "j": j, "g_y0": g})
            np.testing.assert_allclose(found["y0"], total**2, rtol=1e-9, atol=1e-9)
            np.testing.assert_allclose(found["g_grad_x"], wanted[0], rtol=1e-9, atol=1e-9)
            np.testing.assert_allclose(found["g_grad_s"], wanted[1], rtol=1e-9, atol=1e-9)


def test_second_derivatives_of_rows_sent_along_edges() -> None:
    model = derive(message_passing(), kind="hvp")
    assert "TopK" in operators(model)
    i, j = rng.integers(-9, 9, 300), rng.integers(-20, 20, 300)
    shapes = {"x": (9, 64), "s": (20, 64), "x_vector": (9, 64), "s_vector": (20, 64)}
    feeds = {name: normal(*shape) for name, shape in shapes.items()}
    x, s, *directions = (torch.tensor(array, requires_grad=True) for array in feeds.values())
    sent = x.scatter_add(0, torch.tensor(i % 9)[:, None].expand(300, 64), s[torch.tensor(j % 20)])
    first = torch.autograd.grad((sent**2).sum(), [x, s], create_graph=True)
    wanted = torch.autograd.grad(first, [x, s], directions)
    found = Executor(model, fallback=False)({**feeds, "i": i, "j": j})
    for name, want in zip("xs", wanted, strict=True):
        agree(found[f"{name}_hvp"], want.detach().numpy(), 1e-12)


def test_what_is_not_finite_stays_at_its_node_and_an_edge_from_nowhere_is_refused() -> None:
    run = Executor(with_gradient(message_passing(), ["s"], ["y0"], "g_"), fallback=False)
    s, i, j = normal(20, 64), rng.integers(0, 9, 300), rng.integers(0, 20, 300)
    s[3, 5], s[4, 6], i[j == 3], i[j == 4] = -np.inf, np.nan, 2, 7
    feeds = {"x": np.zeros((9, 64)), "i": i, "s": s, "j": j, "g_y0": np.ones((9, 64))}
    y = run(feeds)["y0"]
    assert y[2, 5] == np.inf and np.isnan(y[7, 6]) and np.isfinite(y).sum() == y.size - 2
    for name, nowhere in (("j", 20), ("j", -21), ("i", 9), ("i", -10), ("i", -11)):
        edges = {name: np.where(np.arange(300) == 7, nowhere, feeds[name])}
        with pytest.raises(Exception, match=r"out of|[Ii]nvalid|bounds"):
            run(feeds | edges)
