"""Inputs that have their batch on another axis than the first, and the initial states of recurrent networks.

Data are checked, shuffled and cut into batches along the first axis. The batch of the state [layers, batch, width] is
found by its symbol. Arrays are kept with the axis of the batch first. It is moved back before the model gets them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from onnx import ModelProto, NodeProto, TypeProto, helper

from onnxgrad_cli.common.narration import Tell
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.ir.types import UNNAMED, dtype_of, is_float, shape_of, tensor_type
from onnxgrad_cli.training.data.reading import Column

STATES = {"RNN": 6, "GRU": 6, "LSTM": 7}
"""Recurrent operators -> the place behind their initial states among their inputs, which begin at 5."""

MOVES = frozenset("Cast Expand Gather Identity Reshape Slice Split Squeeze Transpose Unsqueeze".split())
"""Operators that may lie between an input of states and the layer that begins with one of them."""

KEEPS_AXES = frozenset(
    "Add Cast Div Dropout Elu Gelu Identity LayerNormalization LeakyRelu MatMul Mul Relu Sigmoid Sub Tanh".split()
)
"""Operators that may lie between a sequence and the layer that reads it, and leave its first two axes in place."""

InputTypes = Mapping[str, TypeProto]


class Recurrent(NamedTuple):
    """Values that recurrent layers read.

    Attributes:
        states: initial states.
        sequences: values that are read as [time, batch, ...].
    """

    states: frozenset[str] = frozenset()
    sequences: frozenset[str] = frozenset()


NOT_RECURRENT = Recurrent()
"""The values of a model without recurrent layers."""


def batch_axes(inputs: InputTypes, recurrent: Recurrent) -> dict[str, int]:
    """Return the axis of the batch for each input that does not have it first; {} if no symbol alone can be the batch.

    The symbol of initial states is the batch, or the second one of sequences that recurrent layers read. Otherwise it
    is the symbol with which no first axis is another axis too.

    Args:
        inputs: the inputs that must be fed, with their types.
        recurrent: see `recurrent_values`.
    """
    shapes = {name: list(shape_of(value_type) or ()) for name, value_type in inputs.items()}
    found = {dim for name in recurrent.states if name in shapes for dim in filter(_is_named, shapes[name])}
    if not found:
        sequences = (shapes[name] for name in recurrent.sequences if len(shapes.get(name, ())) == 3)
        found = {shape[1] for shape in sequences if _is_named(shape[1])}
    if len(found) == 1:
        symbol = found.pop()
        return {name: shape.index(symbol) for name, shape in shapes.items() if symbol in shape and shape[0] != symbol}
    if _is_consistent(shapes.values()):
        return {}
    fitting = []
    for symbol in dict.fromkeys(filter(_is_named, (shape[0] for shape in shapes.values() if shape))):
        axes = {name: shape.index(symbol) for name, shape in shapes.items() if symbol in shape and shape[0] != symbol}
        if axes and _is_consistent(_first(shape, axes.get(name, 0)) for name, shape in shapes.items()):
            fitting.append(axes)
    return fitting[0] if len(fitting) == 1 else {}


def _is_consistent(shapes: Iterable[list[int | str]]) -> bool:
    """Return True if no symbol is on a first axis and also on a later axis."""
    shapes = list(shapes)
    leading = {shape[0] for shape in shapes if shape and _is_named(shape[0])}
    return all(leading.isdisjoint(shape[1:]) for shape in shapes)


def _is_named(dim: int | str) -> bool:
    return isinstance(dim, str) and dim != "?" and not UNNAMED.fullmatch(dim)


def _first(shape: list[int | str], axis: int) -> list[int | str]:
    return [shape[axis], *shape[:axis], *shape[axis + 1 :]]


def with_batch_first(inputs: InputTypes, axes: Mapping[str, int]) -> dict[str, TypeProto]:
    """Return the types of inputs with the axis of the batch moved to the front."""
    return {
        name: tensor_type(dtype_of(value_type), _first(list(shape_of(value_type) or ()), axes[name]))
        if name in axes
        else value_type
        for name, value_type in inputs.items()
    }


def arrays_batch_first(
    source: Path, columns: Mapping[str, Column], inputs: InputTypes, axes: Mapping[str, int], prefix: str = ""
) -> dict[str, Column]:
    """Return columns with the axis of their batch first.

    Args:
        source: the file or folder, for messages.
        columns: the columns in the model's layout.
        inputs: the types of inputs, with the batch first.
        axes: see `batch_axes`.
        prefix: text before the name of an input in the data, for messages.

    Raises:
        UsageError: an array has another shape.
    """
    return {
        name: _batch_first(source, prefix + name, column, inputs[name], axes[name]) if name in axes else column
        for name, column in columns.items()
    }


def _batch_first(source: Path, name: str, array: Column, value_type: TypeProto, axis: int) -> Column:
    if not isinstance(array, np.ndarray):  # lists are of tokens, and pictures have their batch first
        return array
    rest, shape = (shape_of(value_type) or ())[1:], list(array.shape)
    wanted = [*rest[:axis], "batch", *rest[axis:]]
    if len(shape) != len(wanted) or any(
        isinstance(dim, int) and dim != n for dim, n in zip(wanted, shape, strict=True)
    ):
        raise UsageError(
            f"'{source}': '{name}' has shape {shape}, the model takes [{', '.join(map(str, wanted))}]",
            f"save it with the samples along axis {axis}, such as by numpy.moveaxis(array, 0, {axis})",
        )
    return np.moveaxis(array, axis, 0)


def recurrent_values(nodes: Iterable[NodeProto]) -> Recurrent:
    """Return the initial states and sequences of recurrent layers, and the values that they are made of.

    A state is traced back through operators that move its entries, a sequence through operators that keep its axes.

    Args:
        nodes: the nodes of the model.
    """
    nodes = list(nodes)
    makers = {name: node for node in nodes for name in node.output}

    def origins(names: Iterable[str], through: Collection[str], operands: slice) -> frozenset[str]:
        found, left = set[str](), list(names)
        while left:
            name = left.pop()
            if name and name not in found:
                found.add(name)
                if name in makers and makers[name].op_type in through:
                    left += makers[name].input[operands]
        return frozenset(found)

    layers = [node for node in nodes if node.op_type in STATES]
    states = [name for node in layers for name in node.input[5 : STATES[node.op_type]]]
    sequences = [n.input[0] for n in layers if not any(a.name == "layout" and a.i for a in n.attribute)]
    return Recurrent(origins(states, MOVES, slice(1)), origins(sequences, KEEPS_AXES, slice(None)))


def has_batch_behind(model: ModelProto) -> bool:
    """Return True if an input of a model has its batch on another axis than the first."""
    stored = {tensor.name for tensor in model.graph.initializer}
    inputs = {value.name: value.type for value in model.graph.input if value.name not in stored}
    return bool(batch_axes(inputs, recurrent_values(model.graph.node)))


def outputs_batch_first(model: ModelProto, axes: Mapping[str, int]) -> dict[str, int]:
    """Return the axis of the batch for each output that declares it on a later axis than the first.

    Args:
        model: the model.
        axes: see `batch_axes`.
    """
    shapes = {value.name: shape_of(value.type) or () for value in (*model.graph.input, *model.graph.output)}
    symbols = {shapes[name][axis] for name, axis in axes.items() if name in shapes}
    outputs = {value.name: list(shapes[value.name]) for value in model.graph.output}
    symbol = symbols.pop() if len(symbols) == 1 else ""
    return {name: shape.index(symbol) for name, shape in outputs.items() if symbol in shape and shape[0] != symbol}


def zero_states(
    columns: Mapping[str, Column], inputs: InputTypes, recurrent: Recurrent, tell: Tell
) -> dict[str, np.ndarray]:
    """Make zeros for initial states that are missing in the data, one row per sample.

    Args:
        columns: the columns of the data.
        inputs: the types of inputs, with the batch first.
        recurrent: see `recurrent_values`.
        tell: receives messages for the user.
    """
    size = next((len(column) for column in columns.values() if column.ndim), 0)
    found = {}
    for name in sorted((inputs.keys() - columns.keys()) & recurrent.states):
        dims = (shape_of(inputs[name]) or ())[1:]
        if dims and is_float(inputs[name]) and all(isinstance(dim, int) for dim in dims):
            dtype = helper.tensor_dtype_to_np_dtype(dtype_of(inputs[name]))
            found[name] = np.broadcast_to(np.zeros((), dtype), (size, *map(int, dims)))
    if found:
        tell(f"the data hold no initial state: zeros for {', '.join(found)}", 0)
    return found
