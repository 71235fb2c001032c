"""What a model declares, held against what it stores: a tensor of 2^40 numbers and no bytes is refused by its name.

onnx's checker does not see the weights, which are taken out of what it checks; and what computes with sizes, as the
inference of shapes does, believes them.
"""

from __future__ import annotations

import math

from onnx import ModelProto, TensorProto, helper

from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.files.external_data import tensors
from onnxgrad_cli.ir.types import is_external, packed_bytes

MOST = 2**63 - 1
"""Elements. onnx and onnxruntime count in int64."""

MOST_AXES = 64
"""Axes that an array of numpy has at most: what has more can't be fed, nor computed with."""

NUMBERS_OF: dict[int, int] = {TensorProto.COMPLEX64: 2, TensorProto.COMPLEX128: 2}
"""Element type -> how many numbers store an element, where that is not one."""

SHARING: dict[int, int] = {
    TensorProto.INT4: 2, TensorProto.UINT4: 2, TensorProto.FLOAT4E2M1: 2, TensorProto.INT2: 4, TensorProto.UINT2: 4,
}  # fmt: skip
"""Element type -> how many elements share a stored number, where that is not one."""

KNOWN = frozenset(TensorProto.DataType.values()) - {TensorProto.UNDEFINED}


def check_contents(model: ModelProto, where: str) -> None:
    """Make sure that every tensor of a model stores as many elements as it declares, and no value has too many axes.

    Args:
        model: the model, its external data not loaded; these are held against the files elsewhere.
        where: what the model is called in errors.

    Raises:
        OnnxgradError: a tensor stores more or less than it declares, in a way that nobody reads, or what is no text;
            or a value has more axes than arrays have.
    """
    graph = model.graph
    for value in (*graph.input, *graph.output, *graph.value_info):
        axes = len(value.type.tensor_type.shape.dim)
        if axes > MOST_AXES:
            fault = f"value '{value.name}' has {axes:,} axes; arrays have at most {MOST_AXES}"
            raise OnnxgradError(f"{where} is no valid ONNX model: {fault}", "export it again")
    for tensor in tensors(model):
        fault = _fault(tensor)
        if fault:
            label = f"tensor '{tensor.name}'" if tensor.name else "a tensor without a name"
            raise OnnxgradError(f"{where} is no valid ONNX model: {label} {fault}", "export it again")


def _fault(tensor: TensorProto) -> str:
    """What is wrong with the elements of a tensor; "" for nothing."""
    if tensor.data_type not in KNOWN:
        return f"has elements of the unknown type {tensor.data_type}"
    dims = list(tensor.dims)
    if len(dims) > MOST_AXES:
        return f"has {len(dims):,} axes; arrays have at most {MOST_AXES}"
    if any(dim < 0 for dim in dims) or math.prod(dim for dim in dims if dim) > MOST:
        return f"declares the sizes {_shown(dims)}"
    if tensor.HasField("segment"):
        return "is a segment of a larger one, which no runtime reads"
    if is_external(tensor):
        return ""
    stored, needed, unit = _stored(tensor)
    if stored != needed:
        return f"declares the sizes {_shown(dims)}, which need {needed:,} {unit}, and stores {stored:,}"
    if not all(map(_is_text, tensor.string_data)):
        return "has a string that is no UTF-8, as ONNX wants strings to be"
    return ""


def _is_text(string: bytes) -> bool:
    try:
        string.decode()
    except UnicodeDecodeError:
        return False
    return True


def _stored(tensor: TensorProto) -> tuple[int, int, str]:
    """What a tensor stores and what it would need, and in what that is counted."""
    if tensor.HasField("raw_data") and tensor.data_type != TensorProto.STRING:
        return len(tensor.raw_data), packed_bytes(tensor), "bytes"
    count = math.prod(tensor.dims) * NUMBERS_OF.get(tensor.data_type, 1)
    needed = -(-count // SHARING.get(tensor.data_type, 1))
    stored = len(getattr(tensor, helper.tensor_dtype_to_field(tensor.data_type)))
    return stored, needed, "strings" if tensor.data_type == TensorProto.STRING else "numbers"


def _shown(dims: list[int]) -> str:
    return f"[{', '.join(map(str, dims[:8]))}{', ...' if len(dims) > 8 else ''}]"
