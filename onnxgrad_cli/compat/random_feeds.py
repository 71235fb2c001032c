"""`random_feed` under its old name: random arrays for the inputs of a model, of any type and rank.

If the model is given, integers that it uses as indices are valid. If only its inputs are given, it is unknown which
inputs are indices.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, ValueInfoProto

from onnxgrad_cli.common import checks
from onnxgrad_cli.errors import UsageError, wrong_shape, wrong_type
from onnxgrad_cli.files import ModelSource, read_model
from onnxgrad_cli.ir.types import Shape, dtype_of, shape_of
from onnxgrad_cli.verification.feeds import draw, index_limits


def random_feed(
    inputs: ModelSource | Iterable[Any],
    batch: int = 10,
    empty_dimension: int = 1,
    seed: int | np.random.Generator | None = None,
) -> dict[str, np.ndarray]:
    """Return random arrays for the inputs of a model.

    Floats are normally distributed, integers are 0 or 1, strings are '0' or '1'. If a model is given, integers with
    which Gather or GatherElements index a weight or an input are valid indices. Inputs of the model that have an
    initializer are left out.

    Args:
        inputs: a model (in memory, as a file or as the bytes of a file), its inputs (ValueInfoProto), or the inputs of
            an onnxruntime session (NodeArg).
        batch: the size of each first axis whose size is unknown or 0. A symbol has the same size on all axes.
        empty_dimension: the size of every other axis whose size is unknown.
        seed: the seed for numpy's default_rng, which draws the arrays in the order of the inputs. None draws different
            arrays each time.

    Returns:
        Name -> array, in a type of numpy or of ml_dtypes (bfloat16, float8, int4).

    Raises:
        UsageError: an input is not a tensor (a sequence, an optional, a map), or its rank is unknown.
    """
    checks.at_least("batch", batch, 0, whole=True)
    checks.at_least("empty_dimension", empty_dimension, 0, whole=True)
    model: ModelProto | None = None
    values: Any = inputs
    if not isinstance(inputs, Iterable) or isinstance(inputs, (str, Path, bytes, ModelProto)):
        model = read_model(inputs)[0]  # it refuses other types
        stored = {tensor.values.name for tensor in model.graph.sparse_initializer}
        stored.update(tensor.name for tensor in model.graph.initializer)
        values = [value for value in model.graph.input if value.name not in stored]
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


def _declared(value: Any) -> tuple[int, Shape]:
    """Return the element type and the dimensions of an input, with '?' for unknown dimensions."""
    if isinstance(value, ValueInfoProto):
        kind = value.type.WhichOneof("value")
        if kind != "tensor_type":
            raise _unfit(value.name, f"of type {kind[:-5]}" if kind else "has no type")
        shape = shape_of(value.type)
        if shape is None:
            raise wrong_shape(f"the rank of input '{value.name}' is unknown", "declare its shape in the model")
        return dtype_of(value.type), shape
    element = re.fullmatch(r"tensor\((\w+)\)", value.type)
    if element is None:
        raise _unfit(value.name, value.type)
    return TensorProto.DataType.Value(element[1].upper()), tuple("?" if dim is None else dim for dim in value.shape)


def _unfit(name: str, what: str) -> UsageError:
    return wrong_type(
        f"input '{name}' is not a tensor: {what}", "feed it yourself: random data are drawn only for tensors"
    )
