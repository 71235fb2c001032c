"""`random_feed` under its old name: arrays to try a model with, for inputs of any type and rank.

What is valid as an index is known where the model is given; of inputs alone only types and sizes are known.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, ValueInfoProto

from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.files import ModelSource, read_model
from onnxgrad_cli.ir.types import Shape, dtype_of, shape_of
from onnxgrad_cli.verification.feeds import draw, index_limits


def random_feed(
    inputs: ModelSource | Iterable[Any],
    batch: int = 10,
    empty_dimension: int = 1,
    seed: int | np.random.Generator | None = None,
) -> dict[str, np.ndarray]:
    """Random arrays for the inputs of a model.

    Floats are normal, integers 0 or 1, strings '0' or '1'. Of a model, integers that Gather or GatherElements take to
    index a weight or an input are valid for its size, and inputs that have an initializer are left out.

    Args:
        inputs: a model (itself, its file or the bytes of one), its inputs (ValueInfoProto), or the inputs of an
            onnxruntime session (NodeArg).
        batch: the size of a first axis that is unknown or 0. A symbol has one size wherever it stands.
        empty_dimension: the size of every other axis that is unknown.
        seed: for numpy's default_rng, which draws the arrays in the order of the inputs; None draws others each time.

    Returns:
        Name -> array, in numpy's type or that of ml_dtypes (bfloat16, float8, int4).

    Raises:
        UsageError: an input is no tensor (a sequence, an optional, a map), or its rank is unknown.
    """
    for argument, size in (("batch", batch), ("empty_dimension", empty_dimension)):
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 0:
            raise UsageError(f"{argument} is {size!r}", "it is the size of an axis, a whole number")
    if not isinstance(inputs, Iterable) or isinstance(inputs, (str, Path, bytes, ModelProto)):
        model: ModelProto | None = read_model(inputs)[0]  # which refuses what is none
    else:
        model = None
    values: Iterable[Any] = inputs if model is None else _fed(model)  # type: ignore[assignment]
    declared = {value.name: _declared(value) for value in values}
    leading = {shape[0] for _, shape in declared.values() if shape}

    def size_of(axis: int, dim: int | str) -> int:
        if isinstance(dim, int) and (dim > 0 or (dim == 0 and axis > 0)):
            return dim
        leads = axis == 0 or (isinstance(dim, str) and dim != "?" and dim in leading)
        return batch if leads else empty_dimension

    shapes = {name: [size_of(*pair) for pair in enumerate(shape)] for name, (_, shape) in declared.items()}
    limits = {} if model is None else index_limits(model, shapes)
    rng = np.random.default_rng(seed)
    return {name: draw(rng, declared[name][0], shape, 0, limits.get(name, 2)) for name, shape in shapes.items()}


def _fed(model: ModelProto) -> list[ValueInfoProto]:
    graph = model.graph
    known = {tensor.name for tensor in graph.initializer} | {tensor.values.name for tensor in graph.sparse_initializer}
    return [value for value in graph.input if value.name not in known]


def _declared(value: Any) -> tuple[int, Shape]:
    """The element type and the dimensions of an input, unknown ones as '?'."""
    if isinstance(value, ValueInfoProto):
        kind = value.type.WhichOneof("value")
        if kind != "tensor_type":
            raise _unfit(value.name, "has no type" if kind is None else f"is no tensor but of type {kind[:-5]}")
        shape = shape_of(value.type)
        if shape is None:
            raise UsageError(f"the rank of input '{value.name}' is unknown", "declare its shape in the model")
        return dtype_of(value.type), shape
    element = re.fullmatch(r"tensor\((\w+)\)", value.type)
    if element is None:
        raise _unfit(value.name, f"is no tensor but {value.type}")
    return TensorProto.DataType.Value(element[1].upper()), tuple("?" if dim is None else dim for dim in value.shape)


def _unfit(name: str, what: str) -> UsageError:
    return UsageError(f"input '{name}' {what}", "random data are drawn for tensors only: feed it yourself")
