"""Selections against PyTorch: float64 as the second source, and float32 at real size on two threads, ten times.

onnxruntime's ScatterND(add) loses updates only at size and with threads, so small rows of the table can't see it.
"""

import numpy as np
import pytest
import torch

from onnxgrad_cli.check import Arrays
from onnxgrad_cli.errors import UnsupportedError
from onnxgrad_cli.executor import Executor
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


def words(rows: int, count: int) -> np.ndarray:
    """Indices as in text: a few rows most of the time."""
    return np.minimum(rng.zipf(1.3, count) - 1, rows - 1)


@pytest.mark.parametrize(
    ("rows", "columns", "indices"),
    [
        (30522, 768, words(30522, 1024).reshape(8, 128)),
        (512, 768, rng.integers(0, 8, 1024)),
        (512, 768, -1 - rng.integers(0, 512, (4, 256))),
        (2, 768, rng.integers(0, 2, (8, 512))),
        (100, 64, rng.integers(-100, 100, 4096)),
    ],
    ids=["words of BERT", "many repeats", "from the end", "token types", "a small table"],
)
def test_an_embedding_at_real_size_with_threads(rows: int, columns: int, indices: np.ndarray) -> None:
    table = normal(rows, columns, dtype=np.float32)
    g = normal(*indices.shape, columns, dtype=np.float32)
    (wanted,) = expected(lambda w: w[torch.tensor(indices)], [table], g)
    for static in (table, const(table, np.float32)):
        case = Case("Gather", [static, indices])
        for found in backward(case, ["x0"], g, runs=10):
            agree(found["x0"], wanted, 2e-6)


@pytest.mark.parametrize("axis", [0, 1, 2])
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


def test_gather_nd_with_repeats_at_real_size_with_threads() -> None:
    data, g = normal(512, 32, 64, dtype=np.float32), normal(4096, 64, dtype=np.float32)
    indices = np.stack([rng.integers(0, 30, 4096), rng.integers(-32, 32, 4096)], 1)
    (wanted,) = expected(lambda x: x[tuple(torch.tensor(indices).T)], [data], g)
    for found in backward(Case("GatherND", [data, const(indices)]), ["x0"], g, runs=10):
        agree(found["x0"], wanted, 2e-6)


@pytest.mark.parametrize("reduction", ["max", "min"])
def test_ties_of_a_scatter_share_as_in_pytorch(reduction: str) -> None:
    data, updates = rng.integers(0, 3, (4, 5)) * 1.0, rng.integers(0, 3, (6, 5)) * 1.0
    indices, g = rng.integers(0, 4, (6, 5)), normal(4, 5)
    kind = "a" + reduction
    wanted = expected(lambda x, u: x.scatter_reduce(0, torch.tensor(indices), u, kind), [data, updates], g)
    case = Case("ScatterElements", [data, indices, updates], {"reduction": reduction})
    (found,) = backward(case, ["x0", "x2"], g)
    agree(found["x0"], wanted[0], 1e-14)
    agree(found["x2"], wanted[1], 1e-14)


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


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (Case("ScatterElements", [(3,), const([1]), (1,)], {"reduction": "mul"}), "reduction='mul'"),
        (Case("ScatterND", [(3,), const([[1]]), (1,)], {"reduction": "max"}), "reduction='max'"),
        (Case("ScatterND", [(3,), const([[1]]), (1,)], {"reduction": "mul"}), "reduction='mul'"),
        (Case("Slice", [(3,), const([0]), const([2]), np.array([0])]), "axes of the slice"),
        (Case("Slice", [(3,), const([0]), const([2]), const([0]), np.array([1])]), "steps of the slice"),
        (Case("Pad", [(3,), const([1, 1]), None, np.array([0])], {"mode": "edge"}), "axes of the padding"),
        (Case("GatherND", [(3, 2), np.array([[1]])]), "how many axes"),
    ],
    ids=str,
)
def test_what_is_refused_says_why(case: Case, reason: str) -> None:
    wanted = [f"x{i}" for i, x in enumerate(case.inputs) if isinstance(x, tuple)]
    with pytest.raises(UnsupportedError, match=reason):
        with_gradient(forward_model(case, symbolic=True), wanted, ["y0"], "g_")
