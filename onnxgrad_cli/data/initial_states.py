"""Handle inputs whose batch axis is not the first axis, and the initial states of recurrent networks.

Data are checked, shuffled and cut into batches along the first axis. The batch axis of a state [layers, batch, width]
is found by its symbol. In memory the batch axis of all arrays is the first. It is moved back when a batch is made.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from onnx import ModelProto, NodeProto, TypeProto, helper

from onnxgrad_cli.common.narration import Tell
from onnxgrad_cli.data.input_types import InputTypes
from onnxgrad_cli.data.loaded_columns import Column
from onnxgrad_cli.errors import wrong_shape
from onnxgrad_cli.ir.types import UNNAMED, dtype_of, is_float, shape_of, tensor_type

STATES = {"RNN": 6, "GRU": 6, "LSTM": 7}
"""Recurrent operator -> N, where the inputs 5 to N - 1 of the operator are initial states."""

MOVES = frozenset("Cast Expand Gather Identity Reshape Slice Split Squeeze Transpose Unsqueeze".split())
"""Operators that may lie between a model input with initial states and the recurrent layer that reads one of them."""

KEEPS_AXES = frozenset(
    "Add Cast Div Dropout Elu Gelu Identity LayerNormalization LeakyRelu MatMul Mul Relu Sigmoid Sub Tanh".split()
)
"""Operators that may lie between a sequence and the layer that reads it. They leave the first two axes in place."""


class Recurrent(NamedTuple):
    """The names of the values that recurrent layers read, and of the values from which these are computed.

    Attributes:
        states: initial states.
        sequences: values that are read as [time, batch, ...].
    """

    states: frozenset[str] = frozenset()
    sequences: frozenset[str] = frozenset()


NOT_RECURRENT = Recurrent()
"""The values of a model without recurrent layers."""


def batch_axes(inputs: InputTypes, recurrent: Recurrent) -> dict[str, int]:
    """Find the inputs whose batch axis is not axis 0, and return a map: input -> its batch axis.

    The batch axis is the axis whose size is the batch symbol, which is found by the first rule that applies:

    1. It is the only symbol in the shapes of the initial states. If these have no symbols, it is the only symbol on
       axis 1 of the sequences that recurrent layers read.
    2. If a symbol is on axis 0 of one input and on a later axis of an input, the two conflict. The batch symbol is the
       only symbol on an axis 0 that can be moved to axis 0 of all inputs so that no conflict is left.

    The map is empty if neither rule finds a batch symbol.

    Args:
        inputs: the inputs that must be fed, with their types.
        recurrent: the initial states and the sequences that recurrent layers read.
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
    """Return True if no symbol is on the first axis of one shape and on a later axis of any shape."""
    shapes = list(shapes)
    leading = {shape[0] for shape in shapes if shape and _is_named(shape[0])}
    return all(leading.isdisjoint(shape[1:]) for shape in shapes)


def _is_named(dim: int | str) -> bool:
    return isinstance(dim, str) and dim != "?" and not UNNAMED.fullmatch(dim)


def _first(shape: list[int | str], axis: int) -> list[int | str]:
    return [shape[axis], *shape[:axis], *shape[axis + 1 :]]


def with_batch_first(inputs: InputTypes, recurrent: Recurrent) -> tuple[dict[str, TypeProto], dict[str, int]]:
    """Return the types of inputs, with the batch axis moved to the front, and the moved axes; see `batch_axes`."""
    axes = batch_axes(inputs, recurrent)
    shapes = {name: _first(list(shape_of(inputs[name]) or ()), axis) for name, axis in axes.items()}
    return {**inputs, **{name: tensor_type(dtype_of(inputs[name]), shape) for name, shape in shapes.items()}}, axes


def arrays_batch_first(
    source: Path, columns: Mapping[str, Column], inputs: InputTypes, axes: Mapping[str, int], prefix: str = ""
) -> dict[str, Column]:
    """Return columns with their batch axis moved to the front.

    Args:
        source: the file or folder, for messages.
        columns: the columns in the model's layout.
        inputs: the types of inputs, with the batch first.
        axes: input -> its batch axis in the model, for inputs whose batch axis is not the first.
        prefix: the prefix of the inputs' names in the data, for messages.

    Raises:
        UsageError: an array does not have the input's shape.
    """
    return {
        name: _batch_first(source, prefix + name, column, inputs[name], axes[name]) if name in axes else column
        for name, column in columns.items()
    }


def _batch_first(source: Path, name: str, array: Column, value_type: TypeProto, axis: int) -> Column:
    if not isinstance(array, np.ndarray):  # lists and pictures always have the batch as their first axis
        return array
    rest, shape = (shape_of(value_type) or ())[1:], list(array.shape)
    wanted = [*rest[:axis], "batch", *rest[axis:]]
    fixed = [size if isinstance(dim, str) else dim for dim, size in zip(wanted, shape, strict=False)]
    if len(shape) != len(wanted) or shape != fixed:
        message = f"'{source}': '{name}' has shape {shape}, but the model takes [{', '.join(map(str, wanted))}]"
        hint = f"save it with the samples along axis {axis}, for example with numpy.moveaxis(array, 0, {axis})"
        raise wrong_shape(message, hint)
    return np.moveaxis(array, axis, 0)


def recurrent_values(nodes: Iterable[NodeProto]) -> Recurrent:
    """Return the initial states and sequences that recurrent layers read, and the values that these are computed from.

    A state is traced back through the operators `MOVES`, a sequence through the operators `KEEPS_AXES`.

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
    """Return True if the batch axis of an input of the model is not its first axis."""
    stored = {tensor.name for tensor in model.graph.initializer}
    inputs = {value.name: value.type for value in model.graph.input if value.name not in stored}
    return bool(batch_axes(inputs, recurrent_values(model.graph.node)))


def outputs_batch_first(model: ModelProto, axes: Mapping[str, int]) -> dict[str, int]:
    """Return a map: output whose batch axis is not the first -> its batch axis, according to its declared shape.

    Args:
        model: the model.
        axes: input -> its batch axis, for inputs whose batch axis is not the first.
    """
    shapes = {value.name: shape_of(value.type) or () for value in (*model.graph.input, *model.graph.output)}
    symbols = {shapes[name][axis] for name, axis in axes.items() if name in shapes}
    outputs = {value.name: list(shapes[value.name]) for value in model.graph.output}
    symbol = symbols.pop() if len(symbols) == 1 else ""
    return {name: shape.index(symbol) for name, shape in outputs.items() if symbol in shape and shape[0] != symbol}


def zero_states(
    columns: Mapping[str, Column], inputs: InputTypes, recurrent: Recurrent, tell: Tell
) -> dict[str, np.ndarray]:
    """Return zeros, one row per sample, for each initial state or empty KV cache that the data lack, by name.

    Args:
        columns: the columns of the data.
        inputs: the types of inputs, with the batch first.
        recurrent: the initial states and the sequences that recurrent layers read.
        tell: receives log messages.
    """
    size = next((len(column) for column in columns.values() if column.ndim), 0)
    found = {}
    for name in sorted(inputs.keys() - columns.keys()):
        shape = shape_of(inputs[name]) or ()
        dims = [dim for dim in shape[1:] if isinstance(dim, int)]
        is_state = name in recurrent.states and is_float(inputs[name])
        if dims and len(dims) == len(shape) - 1 and (is_state or 0 in dims):
            dtype = helper.tensor_dtype_to_np_dtype(dtype_of(inputs[name]))
            found[name] = np.broadcast_to(np.zeros((), dtype), (size, *dims))
    if states := [name for name in found if name in recurrent.states]:
        tell(f"the data have no initial state: using zeros for {', '.join(states)}", 0)
    return found
