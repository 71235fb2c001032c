"""Inputs that have their batch on another axis than the first, and the initial states of recurrent networks.

Data are checked, shuffled and cut into batches along the first axis. The batch of an input such as the state
[layers, batch, width] is found by its symbol: its array is read with that axis first, and fed as the model takes it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
from onnx import NodeProto, TypeProto, helper

from onnxgrad_cli.common.narration import Tell
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.ir.types import UNNAMED, dtype_of, is_float, shape_of, tensor_type
from onnxgrad_cli.training.data.reading import Column

STATES = {"RNN": (5,), "GRU": (5,), "LSTM": (5, 6)}
"""Recurrent operators -> the places of their initial states among their inputs."""

MOVES = frozenset("Cast Expand Gather Identity Reshape Slice Split Squeeze Transpose Unsqueeze".split())
"""Operators that may lie between an input of states and the layer that begins with one of them."""

InputTypes = Mapping[str, TypeProto]


def batch_axes(inputs: InputTypes, states: Collection[str]) -> dict[str, int]:
    """Return the axis of the batch for each input that does not have it first; {} if no symbol alone can be the batch.

    The symbol of initial states is the batch. Otherwise it is the one with which no first axis is another axis too.

    Args:
        inputs: what is fed, with its types.
        states: see `initial_states`.
    """
    shapes = {name: list(shape_of(value_type) or ()) for name, value_type in inputs.items()}
    of_states = {dim for name in states if name in shapes for dim in filter(_is_named, shapes[name])}
    if len(of_states) == 1:
        symbol = of_states.pop()
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
    """Return True if no symbol of a first axis is one of another axis."""
    shapes = list(shapes)
    leading = {shape[0] for shape in shapes if shape and _is_named(shape[0])}
    return all(leading.isdisjoint(shape[1:]) for shape in shapes)


def _is_named(dim: int | str) -> bool:
    return isinstance(dim, str) and dim != "?" and not UNNAMED.fullmatch(dim)


def _first(shape: list[int | str], axis: int) -> list[int | str]:
    return [shape[axis], *shape[:axis], *shape[axis + 1 :]]


def with_batch_first(inputs: InputTypes, axes: Mapping[str, int]) -> dict[str, TypeProto]:
    """Return the types of inputs as their arrays are read, with the batch first."""
    return {
        name: tensor_type(dtype_of(value_type), _first(list(shape_of(value_type) or ()), axes[name]))
        if name in axes
        else value_type
        for name, value_type in inputs.items()
    }


def batch_first(source: Path, name: str, array: Column, value_type: TypeProto, axis: int) -> Column:
    """Return an array with the axis of its batch first.

    Args:
        source: the file or folder, for messages.
        name: the input.
        array: as the data hold it, with the batch where the model has it.
        value_type: of the input as the model has it, with the batch first.
        axis: of the batch in the model.

    Raises:
        UsageError: it has another shape.
    """
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


def initial_states(nodes: Iterable[NodeProto]) -> set[str]:
    """Return what recurrent layers begin with, as far as it is only moved from an input.

    Args:
        nodes: of the model; values that nodes make are in the result, too.
    """
    nodes = list(nodes)
    makers = {name: node for node in nodes for name in node.output}

    def origins(name: str) -> Iterator[str]:
        yield name
        if name in makers and makers[name].op_type in MOVES:
            yield from origins(makers[name].input[0])

    places = ((node, place) for node in nodes for place in STATES.get(node.op_type, ()))
    return {
        each for node, place in places if place < len(node.input) and node.input[place]
        for each in origins(node.input[place])
    }  # fmt: skip


def zero_states(
    columns: Mapping[str, Column], inputs: InputTypes, states: Collection[str], tell: Tell
) -> dict[str, np.ndarray]:
    """Return zeros for the initial states that data do not hold, as many as there are samples.

    Args:
        columns: what the data hold.
        inputs: with the batch first.
        states: see `initial_states`.
        tell: takes what is narrated.
    """
    size = next((len(column) for column in columns.values() if column.ndim), 0)
    found = {}
    for name in sorted((inputs.keys() - columns.keys()) & set(states)):
        dims = (shape_of(inputs[name]) or ())[1:]
        if dims and is_float(inputs[name]) and all(isinstance(dim, int) for dim in dims):
            dtype = helper.tensor_dtype_to_np_dtype(dtype_of(inputs[name]))
            found[name] = np.broadcast_to(np.zeros((), dtype), (size, *map(int, dims)))
    if found:
        tell(f"the data hold no initial state: zeros for {', '.join(found)}", 0)
    return found
