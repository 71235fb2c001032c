"""Functions on ONNX types: element types, shapes and sizes in bytes."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Sequence

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
"""Integer types in which weights are stored. Wider integers are assumed to be indices, sizes or sums."""


MAX_INT64 = 2**63 - 1
"""The largest size of an axis. As the `ends` value of a Slice, it reaches to the end of an axis."""

MAX_AXES = 64
"""Maximum number of axes of a numpy array. Tensors with more axes can't be fed or computed."""

MAX_SHAPE_BYTES = 1024
"""Largest size in bytes of a tensor whose values shape inference reads, because it may be a shape or an axis.

Of a larger tensor, which is a weight, inference gets only the type. With 1 GB of weights, it takes 0.01 s instead of
20 s.
"""


UNNAMED = re.compile(r"(unk__|_d)\d+")
"""Pattern of the symbols that onnx and onnxgrad generate for unnamed sizes."""


def tensor_type(dtype: int, shape: Sequence[Dim | None] | None) -> TypeProto:
    """Return the type of a tensor.

    Args:
        dtype: the element type, a TensorProto.DataType.
        shape: the sizes, or None if the rank is unknown. A size of None or '?' is unnamed.
    """
    sizes = None if shape is None else [None if size == "?" else size for size in shape]
    return onnx.helper.make_tensor_type_proto(dtype, sizes)


def shape_of(value_type: TypeProto | None) -> Shape | None:
    """Return the dimensions of a tensor type, or None if the rank is unknown.

    An unnamed dimension is '?'. A negative size, which PaddlePaddle writes for a dynamic size, is '?' too.
    """
    if value_type is None or not value_type.tensor_type.HasField("shape"):
        return None
    dims = value_type.tensor_type.shape.dim
    return tuple(
        dim.dim_value if dim.HasField("dim_value") and dim.dim_value >= 0 else (dim.dim_param or "?") for dim in dims
    )


def known_sizes(sizes: Iterable[Dim | None] | None) -> tuple[int, ...] | None:
    """Return the sizes if all of them are numbers, otherwise None."""
    sizes = None if sizes is None else tuple(sizes)
    numbers = tuple([size for size in sizes or () if isinstance(size, int)])
    return None if sizes is None or len(numbers) < len(sizes) else numbers


def dtype_of(value_type: TypeProto | None) -> int:
    """Return the element type of a tensor type (TensorProto.DataType), or UNDEFINED (0) for any other type."""
    return value_type.tensor_type.elem_type if value_type is not None else TensorProto.UNDEFINED


def element_type(value_type: TypeProto | None) -> TypeProto | None:
    """Return the type of the tensors in a sequence or an optional, or the type itself if it is a tensor type."""
    while value_type is not None and not value_type.HasField("tensor_type"):
        kind = value_type.WhichOneof("value")
        if kind not in ("sequence_type", "optional_type"):
            return None
        value_type = getattr(value_type, kind).elem_type
    return value_type


def in_words(value_type: TypeProto | None) -> str:
    """Return a type as text, such as 'float[batch, 10]', with '?' for an unnamed size and '...' for an unknown rank.

    The text of an unknown type is empty.
    """
    tensor = element_type(value_type)
    kind = value_type.WhichOneof("value") if value_type is not None else None
    if tensor is None or kind is None or not tensor.tensor_type.elem_type:
        return {"map_type": "map", "sparse_tensor_type": "sparse tensor"}.get(kind or "", "")
    shape = shape_of(tensor)
    dims = "..." if shape is None else ", ".join("?" if UNNAMED.fullmatch(str(dim)) else str(dim) for dim in shape)
    text = f"{element_name(tensor.tensor_type.elem_type)}[{dims}]"
    return text if kind == "tensor_type" else f"{kind.removesuffix('_type')} of {text}"


def element_name(dtype: int) -> str:
    """Return the name of an element type, or a text with its number if onnx does not know it."""
    known = dtype in TensorProto.DataType.values()
    return str(TensorProto.DataType.Name(dtype)).lower() if known else f"element type {dtype}"


def nbytes(tensor: TensorProto) -> int:
    """Return the size of a tensor's values in bytes, computed from its type and shape."""
    return math.prod(tensor.dims) * itemsize(tensor.data_type)


@functools.cache
def itemsize(dtype: int) -> int:
    """Return the size in bytes of an element of a TensorProto.DataType."""
    return int(np.dtype(onnx.helper.tensor_dtype_to_np_dtype(dtype)).itemsize)


BITS: dict[int, int] = {
    TensorProto.INT4: 4, TensorProto.UINT4: 4, TensorProto.FLOAT4E2M1: 4, TensorProto.INT2: 2, TensorProto.UINT2: 2,
    TensorProto.FLOAT6E2M3: 6, TensorProto.FLOAT6E3M2: 6,
}  # fmt: skip
"""Element type -> bits per stored element, for types of which several elements share a byte in files."""


def packed_bytes(tensor: TensorProto) -> int:
    """Return the size in bytes of a tensor's values as they are stored; elements below 8 bits share bytes."""
    return (nbytes(tensor) * BITS.get(tensor.data_type, 8) + 7) // 8


def is_external(tensor: TensorProto) -> bool:
    """Return True if the tensor's values are in a separate file beside the model."""
    return tensor.data_location == TensorProto.EXTERNAL


def without_shape(value_type: TypeProto) -> TypeProto:
    """Return a tensor type without its shape. Other types are returned unchanged."""
    return tensor_type(dtype_of(value_type), None) if value_type.HasField("tensor_type") else value_type


def is_float(value_type: TypeProto | None) -> bool:
    """Return True if values of this type are float tensors, which can have a gradient."""
    return dtype_of(value_type) in FLOATS


def is_differentiable(value_type: TypeProto | None) -> bool:
    """Return True if values of this type can have a gradient: float tensors, and sequences or optionals of them."""
    return is_float(element_type(value_type))


Arrays = dict[str, np.ndarray]
