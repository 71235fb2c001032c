"""Check that tensors store as many elements as they declare.

A malicious tensor may declare 2^40 elements and store none. onnx.checker does not detect this, because it checks a copy
of the model without weights. Shape inference and other code trust the declared sizes.
"""

from __future__ import annotations

import math

from onnx import ModelProto, TensorProto, helper

from onnxgrad_cli.errors import unreadable
from onnxgrad_cli.files.external_data import tensors
from onnxgrad_cli.ir.types import is_external, packed_bytes

MAX_ELEMENTS = 2**63 - 1
"""Maximum number of elements of a tensor. onnx and onnxruntime count elements in int64."""

MOST_AXES = 64
"""Maximum number of axes of a numpy array. Tensors with more axes can't be fed or computed."""

NUMBERS_OF: dict[int, int] = {TensorProto.COMPLEX64: 2, TensorProto.COMPLEX128: 2}
"""Element type with several stored numbers per element -> the number of numbers per element."""

SHARING: dict[int, int] = {
    TensorProto.INT4: 2, TensorProto.UINT4: 2, TensorProto.FLOAT4E2M1: 2, TensorProto.INT2: 4, TensorProto.UINT2: 4,
}  # fmt: skip
"""Element type with several elements per stored number -> the number of elements per number."""

KNOWN = frozenset(TensorProto.DataType.values()) - {TensorProto.UNDEFINED}


def check_contents(model: ModelProto, where: str) -> None:
    """Check that every tensor of a model stores as many elements as it declares, and that no value has too many axes.

    Args:
        model: the model. Its external data are not checked here.
        where: the name of the model, for messages.

    Raises:
        OnnxgradError: a tensor stores more or fewer elements than it declares; its element type or its form of storage
            is not supported; a string is not UTF-8; or a value has more axes than a numpy array can have.
    """
    graph = model.graph
    for value in (*graph.input, *graph.output, *graph.value_info):
        axes = len(value.type.tensor_type.shape.dim)
        if axes > MOST_AXES:
            fault = f"value '{value.name}' has {axes:,} axes; arrays have at most {MOST_AXES}"
            raise unreadable(f"{where} is not a valid ONNX model: {fault}", "export it again")
    for tensor in tensors(model):
        if fault := _fault(tensor):
            label = f"tensor '{tensor.name}'" if tensor.name else "a tensor without a name"
            raise unreadable(f"{where} is not a valid ONNX model: {label} {fault}", "export it again")


def _fault(tensor: TensorProto) -> str:
    """Return a description of the fault in a tensor's elements, or "" if they have none."""
    if tensor.data_type not in KNOWN:
        return f"has elements of the unknown type {tensor.data_type}"
    dims = list(tensor.dims)
    if len(dims) > MOST_AXES:
        return f"has {len(dims):,} axes; arrays have at most {MOST_AXES}"
    if any(dim < 0 for dim in dims) or math.prod(dim for dim in dims if dim) > MAX_ELEMENTS:
        return f"declares the invalid sizes {_shown(dims)}"
    if tensor.HasField("segment"):
        return "is a segment of a larger tensor, which no runtime supports"
    if is_external(tensor):
        return ""
    stored, needed, unit = _stored(tensor)
    if stored != needed:
        return f"declares the sizes {_shown(dims)}, which need {needed:,} {unit}, but stores {stored:,}"
    if not all(map(_is_text, tensor.string_data)):
        return "has a string that is not UTF-8, which ONNX requires"
    return ""


def _is_text(string: bytes) -> bool:
    try:
        string.decode()
    except UnicodeDecodeError:
        return False
    return True


def _stored(tensor: TensorProto) -> tuple[int, int, str]:
    """Return the amount of data that a tensor stores, the amount that its sizes require, and the unit of both."""
    if tensor.HasField("raw_data") and tensor.data_type != TensorProto.STRING:
        return len(tensor.raw_data), packed_bytes(tensor), "bytes"
    count = math.prod(tensor.dims) * NUMBERS_OF.get(tensor.data_type, 1)
    needed = -(-count // SHARING.get(tensor.data_type, 1))
    stored = len(getattr(tensor, helper.tensor_dtype_to_field(tensor.data_type)))
    return stored, needed, "strings" if tensor.data_type == TensorProto.STRING else "numbers"


def _shown(dims: list[int]) -> str:
    return f"[{', '.join(map(str, dims[:8]))}{', ...' if len(dims) > 8 else ''}]"
