"""Write the graph that initializes a training run: it draws random weights and resets the optimizer's state.

The variance of the weights is chosen so that activations or gradients keep their magnitude from layer to layer. It
depends on the number of terms in each sum (fan in) and on the number of sums to which an element contributes (fan out).
Both follow from the node that reads the weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, TensorProto, helper, numpy_helper

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.errors import Caution
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node, make_node
from onnxgrad_cli.ir.node_values import attributes_of
from onnxgrad_cli.ir.types import HALVES, known_sizes, shape_of, tensor_type
from onnxgrad_cli.passes.parameters.presets import NORMALIZATIONS, VIEWS
from onnxgrad_cli.record import Training, parts

KEEP = "keep"
SPREAD = 0.02
"""The standard deviation of `normal`, as in BERT and GPT-2."""

Fans = tuple[int, int]
"""(fan in, fan out) of a weight."""

Part = Fans | float
"""The initialization of a weight: fan in and fan out if it is random, or the constant value of all its elements."""

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
SCALE, BIAS, SLOPE = 1.0, 0.0, 0.25
"""Initial values of scales, biases and PRelu slopes. The slope is from He et al. 2015, as in PyTorch."""


def initialization(
    graph: Graph, original: GraphProto, training: Training, how: str, seed: int | None
) -> dict[str, Val]:
    """Write nodes, in a new graph, that compute the values of weights and state before the first step.

    Args:
        graph: the training model.
        original: the inference graph that it was built from.
        how: one of `DRAWS`.
        seed: the seed of the random numbers; None lets the runtime choose.

    Returns:
        Weight or state -> its value in the new graph, which is `Val.op.graph`. If `how` is 'keep', the weights are left
        out, because they start from their stored values.
    """
    opset = helper.make_opsetid("", graph.opset() or 1)
    empty = helper.make_graph([], "initialization", [], [])
    bare = helper.make_model(empty, opset_imports=[opset], ir_version=graph.proto.ir_version)
    op = Op(Graph(bare))
    values: dict[str, Val] = {}
    if how != KEEP:
        draw = _Draw(op, how, seed, len(training.trained))
        readers = _Readers(graph, training)
        for name in training.trained:
            part, tensor = readers.part(name), graph.initializers[name]
            if part is not None:
                values[name] = draw(list(tensor.dims), tensor.data_type, part)
                continue
            text = f"'{name}' starts from its stored value, because its role in the model is unknown"
            training.cautions.append(Caution("note", "`init`", text))
        for name, value in _statistics(original).items():
            if name in training.state and name not in training.trained:
                values[name] = _filled(op, graph.initializers[name], value)
    for name, slot in training.slots.items():
        dtype = helper.np_dtype_to_tensor_dtype(np.dtype(slot.dtype))
        values[name] = _filled(op, TensorProto(data_type=dtype, dims=slot.shape), slot.initial)
    return values


def initializer(values: Mapping[str, Val], names: Mapping[str, str]) -> onnx.ModelProto:
    """Return a model without inputs that computes the values from `initialization`.

    Args:
        values: weight or state -> its value.
        names: weight or state -> the name of the output with its value.
    """
    op = next(iter(values.values())).op
    op.rename_all({names[name]: value for name, value in values.items()})
    op.graph.nodes += op.nodes
    for name in names.values():
        op.graph.add_output(name)
    return op.graph.commit()


def _filled(op: Op, tensor: TensorProto, value: float) -> Val:
    """Return a tensor with the shape and type of `tensor` in which every element is `value`."""
    array = np.full(1, value, helper.tensor_dtype_to_np_dtype(tensor.data_type))
    if not tensor.dims:
        return op.Identity(op.const(array.reshape(())))
    return op.ConstantOfShape(op.ints(list(tensor.dims)), value=numpy_helper.from_array(array))


class _Draw:
    """Draws random weights, each with its own seed.

    The seeds are random numbers too, because onnxruntime's generator is linear in its seed: consecutive seeds give
    similar numbers, and the seeds 0 and 1 give the same numbers.
    """

    def __init__(self, op: Op, how: str, seed: int | None, count: int) -> None:
        self.op, self.how, self._seeds = op, how, None
        if seed is not None:  # integers that are exact in float32, the type of the attribute
            drawn = np.random.default_rng(seed).choice(2**24 - 1, count, replace=False) + 1
            self._seeds = iter(drawn.tolist())

    def __call__(self, dims: list[int], dtype: int, part: Part) -> Val:
        op = self.op
        if not isinstance(part, tuple):
            return _filled(op, TensorProto(data_type=dtype, dims=dims), part)
        fan_in, fan_out = (max(fan, 1) for fan in part)
        if self.how == "xavier":
            bound = math.sqrt(6 / (fan_in + fan_out))
            drawn = self._random("RandomUniform", dims, dtype, low=-bound, high=bound)
        else:
            spread = math.sqrt(2 / fan_in) if self.how == "he" else SPREAD
            drawn = self._random("RandomNormal", dims, dtype, mean=0.0, scale=spread)
        return op.cast(drawn, dtype)

    def _random(self, op_type: str, dims: list[int], dtype: int, **attributes: Any) -> Val:
        graph = self.op.graph
        kind = TensorProto.FLOAT if dtype in HALVES else dtype  # onnxruntime draws only float32 and float64
        if self._seeds is not None:
            attributes["seed"] = float(next(self._seeds))
        name = graph.fresh(f"{op_type}_out")
        node = make_node(op_type, [], [name], name=graph.fresh(op_type), dtype=kind, shape=dims, **attributes)
        graph.types[name] = tensor_type(kind, dims)
        self.op.nodes.append(node)
        return self.op.val(name)


DRAWS: Mapping[str, str] = {
    KEEP: "weights start from their stored values",
    "xavier": "uniform within ±√(6 / (fan in + fan out)); X. Glorot and Y. Bengio, Understanding the difficulty of "
    "training deep feedforward neural networks, AISTATS 2010",
    "he": "normal with variance 2 / fan in; K. He et al., Delving Deep into Rectifiers, ICCV 2015",
    "normal": f"normal with standard deviation {SPREAD}",
}
"""Name of an initialization -> a description of it."""


def _statistics(original: GraphProto) -> dict[str, float]:
    """Return running statistic of a BatchNormalization -> its initial value: 0 for a mean, 1 for a variance."""
    found = [node for node in original.node if node.op_type == "BatchNormalization"]
    return {node.input[at]: value for node in found for at, value in ((3, 0.0), (4, 1.0))}


class _Readers:
    """Finds the initialization of each weight from the nodes of the model that read it."""

    def __init__(self, graph: Graph, training: Training) -> None:
        self.graph = graph
        own = [node for node, part in zip(graph.nodes, parts(graph, training), strict=True) if part == "model"]
        self.uses: dict[str, list[tuple[Node, int]]] = {}
        for node in own:
            for position, name in enumerate(node.input):
                self.uses.setdefault(name, []).append((node, position))

    def part(self, name: str) -> Part | None:
        """Return the initialization of a weight, from a node that reads it or, if none determines it, from its shape.

        Returns:
            None if no node determines the initialization and the weight has fewer than two axes.
        """
        dims = list(self.graph.initializers[name].dims)
        found = self._of(name, dims)
        if found is None and len(dims) > 1:  # as in PyTorch, the axes are outputs, inputs, and those of a kernel
            return dims[1] * math.prod(dims[2:]), dims[0] * math.prod(dims[2:])
        return found

    def _of(self, name: str, dims: Sequence[int]) -> Part | None:
        return next((p for use in self.uses.get(name, ()) if (p := self._at(*use, dims)) is not None), None)

    def _at(self, node: Node, position: int, dims: Sequence[int]) -> Part | None:
        if node.op_type in VIEWS:
            sizes = known_sizes(shape_of(self.graph.types.get(node.output[0])) or ())
            return self._of(node.output[0], sizes) if position == 0 and sizes is not None else None
        if (node.op_type, position) in CONSTANTS:
            return CONSTANTS[node.op_type, position]
        find = FANS.get(node.op_type)
        return find(node, position, dims) if find and len(dims) > 0 else None


CONSTANTS: dict[tuple[str, int], float] = {
    **{(op, 1): SCALE for op in NORMALIZATIONS},
    **{(f"{kind}Normalization", 2): BIAS for kind in ("Batch", "Group", "Instance", "Layer")},
    **{(op, at): SCALE for op in ("Mul", "Div") for at in (0, 1)},
    **{(op, 2): BIAS for op in ("Conv", "ConvTranspose", "Gemm")},
    **{(op, at): BIAS for op in GATES for at in (3, 5, 6, 7)},
    ("PRelu", 1): SLOPE,
}
"""(operator, input position) -> the initial value of a weight that is read there."""


def _matmul(node: Node, position: int, dims: Sequence[int]) -> Part | None:
    if len(dims) == 1:  # a row on the left or a column on the right: the sum runs over all elements
        return dims[0], 1
    rows, columns = dims[-2:]
    return (rows, columns) if position == 1 else (columns, rows)


def _gemm(node: Node, position: int, dims: Sequence[int]) -> Part | None:
    rows, columns = dims
    swapped = attributes_of(node).get("transB" if position else "transA", 0)
    return (rows, columns) if bool(swapped) != (position == 1) else (columns, rows)


def _conv(node: Node, position: int, dims: Sequence[int]) -> Part | None:
    field = math.prod(dims[2:])
    return dims[1] * field, dims[0] // attributes_of(node).get("group", 1) * field


def _conv_transpose(node: Node, position: int, dims: Sequence[int]) -> Part | None:
    fan_in, fan_out = _conv(node, position, dims)  # type: ignore[misc]
    return fan_out, fan_in


def _recurrent(node: Node, position: int, dims: Sequence[int]) -> Part | None:
    return dims[-1], dims[-2] // GATES[node.op_type]


def _rows(node: Node, position: int, dims: Sequence[int]) -> Part | None:
    return (dims[-1], dims[-1]) if position == 0 else None


def _summand(node: Node, position: int, dims: Sequence[int]) -> Part | None:
    """Return the initialization of a weight that is added to a value: a bias, or a table such as position embeddings.

    A weight with at most one axis of a size above 1 counts as a bias.
    """
    return BIAS if sum(size > 1 for size in dims) <= 1 else (dims[-1], dims[-1])


def _einsum(node: Node, position: int, dims: Sequence[int]) -> Part | None:
    left, arrow, result = attributes_of(node).get("equation", b"").decode().replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow or "." in left or len(terms[position]) != len(dims):
        return None
    sizes = dict(zip(terms[position], dims, strict=True))
    others = set("".join(term for at, term in enumerate(terms) if at != position))
    summed = [size for letter, size in sizes.items() if letter not in result]
    made = [size for letter, size in sizes.items() if letter in result and letter not in others]
    return math.prod(summed), math.prod(made)


FANS: dict[str, Callable[[Node, int, Sequence[int]], Part | None]] = {
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Gather": _rows,
    "Add": _summand,
    "Sub": _summand,
    "Einsum": _einsum,
    **dict.fromkeys(GATES, _recurrent),
}
"""Operator -> a function that returns the initialization of the weight at a given input position."""
