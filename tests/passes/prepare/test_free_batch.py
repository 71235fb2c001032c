"""Operators whose batch is freed, against runs of the original on one batch after the other."""

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxgrad_cli.errors import UnsupportedError
from onnxgrad_cli.ir.types import shape_of
from onnxgrad_cli.passes.prepare.free_batch import FixedBatch
from onnxgrad_cli.verification.checks.freed_batch import freed
from tests.autodiff.rows import ROWS
from tests.harness import Case, forward_model

FIRST = {(case.op, case.domain): case for case in reversed(ROWS)}
BY_REFERENCE = {"LRN"}
"""Operators whose implementation in onnx.reference is wrong for more samples than channels."""


def shapes_of(model: onnx.ModelProto) -> dict[str, tuple[int | str, ...]]:
    stored = {tensor.name for tensor in model.graph.initializer}
    return {v.name: shape_of(v.type) or () for v in model.graph.input if v.name not in stored}


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in FIRST.values() if case.op not in BY_REFERENCE], ids=str)
def test_an_operator_gives_what_it_gave_for_each_batch_alone(case: Case) -> None:
    """Or the batch is refused before any run."""
    model = forward_model(case, False)
    shapes = shapes_of(model)
    for size in {shape[0] for shape in shapes.values() if shape and isinstance(shape[0], int)}:
        axes = {name: 0 for name, shape in shapes.items() if shape and shape[0] == size}
        try:
            found = freed(model, None, FixedBatch(axes, size, "n"))
        except UnsupportedError:
            continue
        found.compare()


class Drawn:
    """A random graph on x [batch, n, m], most of which moves axes about."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.batch = int(self.rng.choice([1, 1, 2]))
        self.nodes: list[onnx.NodeProto] = []
        self.stored: list[onnx.TensorProto] = []
        self.values = [("x", (self.batch, int(self.rng.choice([2, 4, 6])), int(self.rng.choice([2, 3, 4]))))]
        for _ in range(int(self.rng.integers(2, 10))):
            name, shape = self.values[-int(self.rng.integers(1, 3)) :][0]
            if 0 < math.prod(shape) < 5000 and shape:
                getattr(self, str(self.rng.choice(STEPS)))(name, shape)

    def model(self) -> onnx.ModelProto:
        (x, y), kind = (self.values[0], self.values[-1]), TensorProto.FLOAT
        ends = [[helper.make_tensor_value_info(name, kind, shape)] for name, shape in (x, y)]
        graph = helper.make_graph(self.nodes, "drawn", *ends, self.stored)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)

    def constant(self, values: Any) -> str:
        array = np.asarray(values)
        self.stored.append(numpy_helper.from_array(array, f"c{len(self.stored)}"))
        return self.stored[-1].name

    def weight(self, *shape: int) -> str:
        return self.constant(self.rng.standard_normal(shape).astype(np.float32))

    def put(self, op_type: str, inputs: list[str], shape: Sequence[int], **attributes: Any) -> None:
        self.nodes.append(helper.make_node(op_type, inputs, [f"v{len(self.nodes)}"], **attributes))
        self.values.append((self.nodes[-1].output[0], tuple(shape)))

    def axis(self, shape: Sequence[int]) -> int:
        return int(self.rng.integers(len(shape)))

    def reshape(self, x: str, shape: tuple[int, ...]) -> None:
        sizes, rest = [1] * int(self.rng.integers(1, 5)), math.prod(shape)
        for prime in (2, 3, 5):
            while rest % prime == 0:
                sizes[self.axis(sizes)] *= prime
                rest //= prime
        sizes[-1] *= rest
        target = np.array(sizes)
        if self.rng.random() < 0.4:
            target[self.axis(sizes)] = -1
        self.put("Reshape", [x, self.constant(target)], sizes)

    def transpose(self, x: str, shape: tuple[int, ...]) -> None:
        order = [int(axis) for axis in self.rng.permutation(len(shape))]
        self.put("Transpose", [x], [shape[axis] for axis in order], perm=order)

    def flatten(self, x: str, shape: tuple[int, ...]) -> None:
        axis = int(self.rng.integers(len(shape) + 1))
        self.put("Flatten", [x], [math.prod(shape[:axis]), math.prod(shape[axis:])], axis=axis)

    def product(self, x: str, shape: tuple[int, ...]) -> None:
        self.put("MatMul", [x, self.weight(shape[-1], 3)], [*shape[:-1], 3])

    def squared(self, x: str, shape: tuple[int, ...]) -> None:
        if len(shape) > 1:
            order = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
            self.put("Transpose", [x], [shape[axis] for axis in order], perm=order)
            self.put("MatMul", [x, self.values[-1][0]], [*shape[:-1], shape[-2]])

    def softmax(self, x: str, shape: tuple[int, ...]) -> None:
        self.put("Softmax", [x], shape, axis=self.axis(shape))

    def mean(self, x: str, shape: tuple[int, ...]) -> None:
        axis = self.axis(shape)
        self.put("ReduceMean", [x], [*shape[:axis], 1, *shape[axis + 1 :]], axes=[axis])

    def added(self, x: str, shape: tuple[int, ...]) -> None:
        sizes = [size if self.rng.random() < 0.6 else 1 for size in shape][int(self.rng.integers(len(shape))) :]
        self.put("Add", [x, self.weight(*sizes)], shape)

    def joined(self, x: str, shape: tuple[int, ...]) -> None:
        axis = self.axis(shape)
        sizes = [2 if at == axis else size for at, size in enumerate(shape)]
        self.put("Concat", [x, self.weight(*sizes)], [s + 2 * (at == axis) for at, s in enumerate(shape)], axis=axis)

    def squeezed(self, x: str, shape: tuple[int, ...]) -> None:
        if 1 in shape[:-1]:
            axis = shape.index(1)
            self.put("Squeeze", [x, self.constant(np.array([axis]))], [*shape[:axis], *shape[axis + 1 :]])

    def unsqueezed(self, x: str, shape: tuple[int, ...]) -> None:
        axis = self.axis(shape)
        self.put("Unsqueeze", [x, self.constant(np.array([axis]))], [*shape[:axis], 1, *shape[axis:]])

    def gathered(self, x: str, shape: tuple[int, ...]) -> None:
        axis = self.axis(shape)
        indices = self.rng.integers(-shape[axis], shape[axis], [(1,), (2,), (1, 2)][int(self.rng.integers(3))])
        sizes = [*shape[:axis], *indices.shape, *shape[axis + 1 :]]
        self.put("Gather", [x, self.constant(indices)], sizes, axis=axis)

    def tiled(self, x: str, shape: tuple[int, ...]) -> None:
        times = [int(self.rng.choice([1, 1, 2])) for _ in shape]
        self.put("Tile", [x, self.constant(np.array(times))], [s * t for s, t in zip(shape, times, strict=True)])


STEPS = ["reshape", *(name for name in vars(Drawn) if not name.startswith("_") and name not in
                      ("model", "constant", "weight", "put", "axis"))]  # fmt: skip


@pytest.mark.slow
def test_random_graphs_give_what_they_gave_one_by_one() -> None:
    compared = 0
    for seed in range(1000):
        drawn = Drawn(seed)
        model = drawn.model()
        if not drawn.nodes:
            continue
        onnx.checker.check_model(model, full_check=True)
        try:
            found = freed(model, None, FixedBatch({"x": 0}, drawn.batch, "n"))
        except UnsupportedError:
            continue
        compared += "gives the same results" in str(found.compare())
    assert compared > 300


SMALL = {
    "squeezed": (1, "s = Squeeze(x, zero) m = Mul(s, row) y = Unsqueeze(m, zero)"),
    "gathered": (1, "s = Gather<axis = 0>(x, first) m = Mul(s, row) y = Unsqueeze(m, zero)"),
    "moved": (1, "s = Squeeze(x, zero) m = Mul(s, row) n = Unsqueeze(m, one) y = Transpose<perm = [1, 0]>(n)"),
    "of two": (2, "y = Add(x, rows)"),
    "filled": (2, "e = Expand(row, sizes) y = Mul(x, e)"),
    "expanded": (2, "m = ReduceMean<axes = [1]>(x) y = Expand(m, sizes)"),
    "joined": (2, "r = Reshape(x, longer) t = Tanh(r) y = Reshape(t, sizes)"),
}
"""Batch size -> nodes on x [batch, 4], each with a constant that depends on the batch size."""


@pytest.mark.parametrize("name", SMALL)
def test_constants_that_depend_on_the_batch_size_are_replaced(name: str) -> None:
    size, nodes = SMALL[name]
    text = f'<ir_version: 8, opset_import: ["": 17]> g (float[{size}, 4] x) => (float[{size}, 4] y) {{ {nodes} }}'
    model = onnx.parser.parse_model(text)
    stored = {
        "zero": np.array([0]), "one": np.array([1]), "first": np.array(0), "row": np.float32([1, 2, 3, 4]),
        "rows": np.float32([[1, 2, 3, 4]] * 2), "sizes": np.array([size, 4]), "longer": np.array([2 * size, 2]),
    }  # fmt: skip
    model.graph.initializer.extend(
        numpy_helper.from_array(array, each) for each, array in stored.items() if re.search(rf"\b{each}\b", nodes)
    )
    freed(model, None, FixedBatch({"x": 0}, size, "n")).compare()
