"""Find the shapes of a model's values by running the model, instead of inferring them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from pathlib import Path

import numpy as np
from onnx import ModelProto, TensorProto, TypeProto, ValueInfoProto, helper

from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.execution.limits import counted
from onnxgrad_cli.execution.sizes_to_try import switch_values
from onnxgrad_cli.files import load_external_data
from onnxgrad_cli.ir.node_values import with_bodies
from onnxgrad_cli.ir.types import Arrays, Shape, dtype_of, is_external, is_float, nbytes, shape_of
from onnxgrad_cli.ir.weightless_copy import copied

MAX_WEIGHT_BYTES, MAX_NODES = 128 << 20, 20_000
"""The largest size of weights in bytes, and the largest number of nodes, of a model that is run by default.

Nodes in bodies count.
"""

PROVABLE = 1 << 30
"""The largest number of bytes of weights of a model whose gradients are proved by default.

The proof takes up to four times as much memory as the weights.
"""

Shapes = Mapping[str, Sequence[int]]

_samples: ContextVar[Mapping[str, np.ndarray]] = ContextVar("samples")


@contextmanager
def given_samples(arrays: Mapping[str, np.ndarray]) -> Iterator[None]:
    """Make the user's arrays, by input name, available to `Probe` and `samples_for` inside the block."""
    token = _samples.set(arrays)
    try:
        yield
    finally:
        _samples.reset(token)


def samples_for(model: ModelProto) -> Arrays | None:
    """Return the user's arrays for the inputs that must be fed, converted to their types; None if one is missing."""
    types, arrays = fed_types(model), _samples.get({})
    if not arrays or not all(name in arrays for name in types):
        return None
    return {name: _sample(name, value_type) for name, value_type in types.items()}


def _sample(name: str, value_type: TypeProto) -> np.ndarray:
    """Return the user's array for an input, converted to the type of the input."""
    return np.asarray(_samples.get()[name]).astype(helper.tensor_dtype_to_np_dtype(dtype_of(value_type)))


def weight_bytes(model: ModelProto) -> int:
    """Return the size in bytes of a model's initializers, whether they are in the model or in other files."""
    return sum(nbytes(tensor) for tensor in model.graph.initializer)


def too_large(model: ModelProto, most: int = MAX_WEIGHT_BYTES) -> str:
    """Return the reason why a model is not run by default; "" if it is small enough to run in seconds.

    Args:
        model: the model.
        most: the largest number of bytes of weights of a small model.
    """
    size, count = weight_bytes(model), sum(1 for _ in with_bodies(model.graph.node))
    if size > most:
        return f"{size / 1e6:,.0f} MB of weights"
    return f"{count:,} nodes" if count > MAX_NODES else ""


def is_quick(model: ModelProto) -> bool:
    """Return True if a model is small enough to be run by default."""
    return not too_large(model)


def fed_types(model: ModelProto) -> dict[str, TypeProto]:
    """Return a map: input -> its type, for the inputs that have no stored value."""
    stored = {tensor.name for tensor in model.graph.initializer}
    return {value.name: value.type for value in model.graph.input if value.name not in stored}


def fed_shapes(model: ModelProto) -> dict[str, Shape] | None:
    """Return a map: input -> its shape, for the inputs that have no stored value.

    Return None if an input has an unknown rank or is not a tensor.
    """
    shapes = {name: shape_of(value_type) for name, value_type in fed_types(model).items()}
    known = {name: shape for name, shape in shapes.items() if shape is not None}
    return known if len(known) == len(shapes) else None


class Probe:
    """Runs a model on arrays of given shapes, and returns chosen values of the model.

    Attributes:
        model: a copy of the model in which the sizes of inputs have no symbols.
        types: the types of its inputs, as the model declares them.
        names: the names of the values that are returned.
        shapes_only: True if only the shapes of the values are returned.

    Args:
        model: the model; it is not changed.
        names: the names of the values to return.
        path: the file the model was read from; external data are relative to it.
        shapes_only: return the shapes of the values, which must be tensors.

    Raises:
        Exception: onnxruntime does not accept the model.
    """

    def __init__(self, model: ModelProto, names: Iterable[str], path: Path | None, shapes_only: bool = False) -> None:
        self.model = copied(model)
        if any(is_external(tensor) for tensor in model.graph.initializer):
            load_external_data(self.model, path)
        graph = self.model.graph
        self.types: dict[str, TypeProto] = {}
        self.names = list(names)
        self.shapes_only = shapes_only
        del graph.output[:], graph.value_info[:]
        for value in graph.input:  # onnxruntime shares buffers between values of equal symbols
            self.types[value.name] = deepcopy(value.type)
            for dim in value.type.tensor_type.shape.dim:
                if dim.HasField("dim_param"):
                    dim.Clear()
        for i, name in enumerate(self.names):
            graph.output.append(ValueInfoProto(name=f"onnxgrad/shape/{i}" if shapes_only else name))
            if shapes_only:
                graph.node.append(helper.make_node("Shape", [name], [graph.output[-1].name]))
        self._run = Executor(self.model, fallback=False)

    def __call__(self, shapes: Shapes) -> Arrays:
        """Run the model on arrays of these shapes, and return the values.

        Floats are random between 0 and 1. Other types are zeros, or ones if the model fails on zeros. A single integer
        is 1, or the stored integer that the model compares it with. Arrays of the user (`given_samples`) that have the
        same shape are used instead.

        Raises:
            Exception: the model does not run on the arrays.
        """
        types, switches = fed_types(self.model), switch_values(self.model)

        def drawn(fill: int) -> Arrays:
            with counted():
                arrays = {name: _drawn(dtype_of(types[name]), shape, fill) for name, shape in shapes.items()}
                arrays |= {name: np.full_like(arrays[name], at) for name, at in switches.items() if not fill}
                given = _samples.get({}).items()
                same = [name for name, x in given if name in arrays and np.shape(x) == arrays[name].shape]
                return arrays | {name: _sample(name, types[name]) for name in same}

        try:
            outputs = self._run(drawn(0))
        except Exception:  # onnxruntime's exceptions share no base class
            if all(is_float(value_type) for value_type in types.values()):
                raise
            outputs = self._run(drawn(1))
        return dict(zip(self.names, outputs.values(), strict=True))

    def on(self, arrays: Arrays) -> Arrays:
        """Run the model on these arrays, and return the values.

        Raises:
            Exception: the model does not run on them.
        """
        return dict(zip(self.names, self._run(arrays).values(), strict=True))


def _drawn(dtype: int, shape: Sequence[int], fill: int) -> np.ndarray:
    """Return an array of a type (a TensorProto.DataType): random floats, or filled with `fill` for other types.

    A single integer is always 1, because it may be a step or a length.
    """
    hides = bool(shape) or dtype == TensorProto.BOOL
    array = np.full(shape, fill if hides else 1, np.float64)  # a single number may be a step or a length
    if dtype in (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16):
        array = np.random.default_rng(0).uniform(0.05, 0.95, shape)
    if dtype == TensorProto.STRING:
        return array.astype(str)
    return np.asarray(array.astype(helper.tensor_dtype_to_np_dtype(dtype)))
