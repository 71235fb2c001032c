"""Types of values: element types and shapes, as ONNX declares them."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence

import numpy as np
import onnx
from onnx import TensorProto, TypeProto

Dim = int | str
Shape = tuple[Dim, ...]

HALVES = frozenset({TensorProto.FLOAT16, TensorProto.BFLOAT16})


FLOATS = frozenset({TensorProto.FLOAT, TensorProto.DOUBLE}) | HALVES


NARROW = frozenset(
    {TensorProto.INT8, TensorProto.UINT8, TensorProto.INT4, TensorProto.UINT4, TensorProto.INT2, TensorProto.UINT2}
)
"""Integers that weights are stored as; wider ones are indices, sizes or sums."""


SMALL = 1024
"""Bytes. A tensor up to this size may be a shape or an axis, so shape inference sees its values; a larger one
is a weight, and inference sees its type only (1 GB of weights: 0.01 s instead of 20 s)."""


UNNAMED = re.compile(r"(unk__|_d)\d+")
"""Symbols that onnx and we give to sizes that have no name."""


def tensor_type(dtype: int, shape: Sequence[Dim | None] | None) -> TypeProto:
    """The type of a tensor of `dtype` (a TensorProto.DataType) and `shape`; None is an unknown rank.

    A size that is None, or '?' as `shape_of` gives it, has no name.
    """
    sizes = None if shape is None else [None if size == "?" else size for size in shape]
    return onnx.helper.make_tensor_type_proto(dtype, sizes)


def shape_of(value_type: TypeProto | None) -> Shape | None:
    """The dimensions of a tensor type, unnamed ones as '?'; None when the rank is unknown."""
    if value_type is None or not value_type.tensor_type.HasField("shape"):
        return None
    return tuple(
        dim.dim_value if dim.HasField("dim_value") else (dim.dim_param or "?")
        for dim in value_type.tensor_type.shape.dim
    )


def dtype_of(value_type: TypeProto | None) -> int:
    """The element type of a tensor type (TensorProto.DataType); 0, UNDEFINED, when it is not a known tensor."""
    return value_type.tensor_type.elem_type if value_type is not None else TensorProto.UNDEFINED


def element_type(value_type: TypeProto | None) -> TypeProto | None:
    """The type of the tensors in a sequence or an optional; a tensor's type is its own."""
    while value_type is not None and not value_type.HasField("tensor_type"):
        kind = value_type.WhichOneof("value")
        if kind not in ("sequence_type", "optional_type"):
            return None
        value_type = getattr(value_type, kind).elem_type
    return value_type


def in_words(value_type: TypeProto | None) -> str:
    """A type for a reader, as 'float[batch, 10]': '?' is an unnamed size, '...' an unknown rank, "" no type."""
    tensor = element_type(value_type)
    kind = value_type.WhichOneof("value") if value_type is not None else None
    if tensor is None or kind is None or not tensor.tensor_type.elem_type:
        return {"map_type": "map", "sparse_tensor_type": "sparse tensor"}.get(kind or "", "")
    shape = shape_of(tensor)
    dims = "..." if shape is None else ", ".join("?" if UNNAMED.fullmatch(str(dim)) else str(dim) for dim in shape)
    text = f"{element_name(tensor.tensor_type.elem_type)}[{dims}]"
    return text if kind == "tensor_type" else f"{kind.removesuffix('_type')} of {text}"


def element_name(dtype: int) -> str:
    """What a TensorProto.DataType is called; its number where it is none."""
    known = dtype in TensorProto.DataType.values()
    return str(TensorProto.DataType.Name(dtype)).lower() if known else f"element type {dtype}"


def nbytes(tensor: TensorProto) -> int:
    """The size of a tensor's values in bytes, from its type and shape alone."""
    return math.prod(tensor.dims) * itemsize(tensor.data_type)


@functools.cache
def itemsize(dtype: int) -> int:
    """The size of an element in bytes, of a TensorProto.DataType."""
    return int(np.dtype(onnx.helper.tensor_dtype_to_np_dtype(dtype)).itemsize)


BITS: dict[int, int] = {
    TensorProto.INT4: 4, TensorProto.UINT4: 4, TensorProto.FLOAT4E2M1: 4, TensorProto.INT2: 2, TensorProto.UINT2: 2,
    TensorProto.FLOAT6E2M3: 6, TensorProto.FLOAT6E3M2: 6,
}  # fmt: skip
"""Element type -> the bits of an element where it is stored, for those that share bytes."""


def packed_bytes(tensor: TensorProto) -> int:
    """The size of a tensor's values as they are stored, where short elements share bytes."""
    return (nbytes(tensor) * BITS.get(tensor.data_type, 8) + 7) // 8


def is_external(tensor: TensorProto) -> bool:
    """Whether the tensor's values stand in a file beside the model."""
    return tensor.data_location == TensorProto.EXTERNAL


def without_shape(value_type: TypeProto) -> TypeProto:
    """The type of a tensor of any shape; another type as it is."""
    return tensor_type(dtype_of(value_type), None) if value_type.HasField("tensor_type") else value_type


def is_float(value_type: TypeProto | None) -> bool:
    """Whether a value of this type can carry a cotangent."""
    return dtype_of(value_type) in FLOATS


def is_differentiable(value_type: TypeProto | None) -> bool:
    """Whether a value of this type can carry a cotangent: a float tensor, or a sequence or optional of such."""
    return is_float(element_type(value_type))


Arrays = dict[str, np.ndarray]
