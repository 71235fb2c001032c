"""What shapes the values of a model have when it runs: read off, not inferred."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import numpy as np
from onnx import ModelProto, TensorProto, TypeProto, ValueInfoProto, helper

from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.execution.limits import counted
from onnxgrad_cli.execution.sizes import switch_values
from onnxgrad_cli.files import load_external_data
from onnxgrad_cli.ir.nodes import with_bodies
from onnxgrad_cli.ir.skeleton import copied
from onnxgrad_cli.ir.types import Arrays, Shape, dtype_of, is_external, is_float, nbytes, shape_of

LARGE, LONG = 128 << 20, 20_000
"""Bytes of weights and nodes, those of bodies too, up to which a model is run unasked."""

PROVABLE = 1 << 30
"""Bytes of weights up to which a model is proved unasked; the proof takes up to four times as much."""

Shapes = Mapping[str, Sequence[int]]

_samples: ContextVar[Mapping[str, np.ndarray]] = ContextVar("samples")


@contextmanager
def given_samples(arrays: Mapping[str, np.ndarray]) -> Iterator[None]:
    """Let runs that observe a model inside be fed these arrays, by input name, if they are all that it must be fed."""
    token = _samples.set(arrays)
    try:
        yield
    finally:
        _samples.reset(token)


def samples_for(model: ModelProto) -> Arrays | None:
    """Return the given arrays that a model must be fed, in its types; None if there are none, or not all of them."""
    types, arrays = fed_types(model), _samples.get({})
    if not arrays or not all(name in arrays for name in types):
        return None
    return {name: _sample(name, value_type) for name, value_type in types.items()}


def _sample(name: str, value_type: TypeProto) -> np.ndarray:
    """Return a given array in the type of the input that it is for."""
    return np.asarray(_samples.get()[name]).astype(helper.tensor_dtype_to_np_dtype(dtype_of(value_type)))


def weight_bytes(model: ModelProto) -> int:
    """The bytes of a model's initializers, wherever they lie."""
    return sum(nbytes(tensor) for tensor in model.graph.initializer)


def too_large(model: ModelProto, most: int = LARGE) -> str:
    """Return the reason why a model is not run by default; "" if it is small enough to run in seconds.

    Args:
        model: the model.
        most: the bytes of weights up to which it is.
    """
    size, count = weight_bytes(model), sum(1 for _ in with_bodies(model.graph.node))
    if size > most:
        return f"{size / 1e6:,.0f} MB of weights"
    return f"{count:,} nodes" if count > LONG else ""


def is_quick(model: ModelProto) -> bool:
    """Whether a model is small enough to be run unasked."""
    return not too_large(model)


def fed_types(model: ModelProto) -> dict[str, TypeProto]:
    """The types of the inputs that a run must be fed."""
    stored = {tensor.name for tensor in model.graph.initializer}
    return {value.name: value.type for value in model.graph.input if value.name not in stored}


def fed_shapes(model: ModelProto) -> dict[str, Shape] | None:
    """The shapes of the inputs that a run must be fed; None where one is of unknown rank or no tensor."""
    types = fed_types(model)
    shapes = {name: shape_of(value_type) for name, value_type in types.items()}
    known = {name: shape for name, shape in shapes.items() if shape is not None}
    return known if len(known) == len(types) and all(t.HasField("tensor_type") for t in types.values()) else None


class Probe:
    """Runs a model and gives the values of any names in it.

    Attributes:
        model: a copy of the model, in which no size of an input has a name.
        types: the types of its inputs, as the model declares them.
        names: the values that are fetched.
        shapes_only: whether only their shapes are.

    Args:
        model: the model; it is not changed.
        names: the values to fetch.
        path: where the model was read from; external data are relative to it.
        shapes_only: fetch the shapes of the values, which must be tensors.

    Raises:
        Exception: onnxruntime's own, where it does not take the model.
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
            self.types[value.name] = TypeProto()
            self.types[value.name].CopyFrom(value.type)
            for dim in value.type.tensor_type.shape.dim:
                if dim.HasField("dim_param"):
                    dim.Clear()
        for i, name in enumerate(self.names):
            graph.output.append(ValueInfoProto(name=f"onnxgrad/shape/{i}" if shapes_only else name))
            if shapes_only:
                graph.node.append(helper.make_node("Shape", [name], [graph.output[-1].name]))
        self._run = Executor(self.model, fallback=False)

    def __call__(self, shapes: Shapes) -> Arrays:
        """The values of a run on data of these shapes: floats between 0 and 1, and zeros, or ones if these don't fit.

        An input of one integer is the stored integer that the model compares it with, if it does; or 1. Given data of
        the same shape replace drawn data.

        Raises:
            Exception: onnxruntime's own, where the model does not run on them.
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
        """The values of a run on these arrays.

        Raises:
            Exception: onnxruntime's own, where the model does not run on them.
        """
        return dict(zip(self.names, self._run(arrays).values(), strict=True))


def _drawn(dtype: int, shape: Sequence[int], fill: int) -> np.ndarray:
    """Data of an element type (a TensorProto.DataType) and a shape."""
    hides = bool(shape) or dtype == TensorProto.BOOL
    array = np.full(shape, fill if hides else 1, np.float64)  # a number alone may be a step, or a length
    if dtype in (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16):
        array = np.random.default_rng(0).uniform(0.05, 0.95, shape)
    if dtype == TensorProto.STRING:
        return array.astype(str)
    return np.asarray(array.astype(helper.tensor_dtype_to_np_dtype(dtype)))
