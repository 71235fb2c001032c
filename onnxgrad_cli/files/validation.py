"""Check that a model is valid. This happens once, when the model is read, so that rules and passes can rely on it.

onnx.checker sees a copy of the model without weights. This module also checks that each tensor stores as many elements
as it declares: a malicious one may declare 2^40 and store none, and shape inference and other code trust the declared
sizes. Shapes and types that contradict each other are found later, by `ir.type_inference.infer_types`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import onnx
from google.protobuf.message import Message  # type: ignore[import-untyped]
from onnx import ModelProto, SparseTensorProto, TensorProto, helper

from onnxgrad_cli.errors import unreadable
from onnxgrad_cli.files.external_data import tensors
from onnxgrad_cli.ir.dialects import checker_error, repair
from onnxgrad_cli.ir.functions import check_growth
from onnxgrad_cli.ir.types import MAX_AXES, dtype_of, element_type, is_external, packed_bytes
from onnxgrad_cli.ir.weightless_copy import skeleton

MAX_ELEMENTS = 2**63 - 1
"""Maximum number of elements of a tensor. onnx and onnxruntime count elements in int64."""

NUMBERS_OF: dict[int, int] = {TensorProto.COMPLEX64: 2, TensorProto.COMPLEX128: 2}
"""Element type with several stored numbers per element -> the number of numbers per element."""

SHARING: dict[int, int] = {
    TensorProto.INT4: 2, TensorProto.UINT4: 2, TensorProto.FLOAT4E2M1: 2, TensorProto.INT2: 4, TensorProto.UINT2: 4,
}  # fmt: skip
"""Element type with several elements per stored number -> the number of elements per number."""

FOR_PEOPLE = frozenset({"doc_string", "producer_name", "producer_version"})
"""Fields that need not be UTF-8, because no command depends on them."""

KNOWN = frozenset(TensorProto.DataType.values()) - {TensorProto.UNDEFINED}


def check_model(model: ModelProto, where: str) -> None:
    """Check a model, except for its external data.

    Args:
        model: the model.
        where: the name of the model, for messages.

    Raises:
        OnnxgradError: a name is not UTF-8; a value has an unknown element type or more axes than a numpy array can
            have; a tensor stores more or fewer elements than it declares, or its element type or its form of storage is
            not supported; the model breaks the ONNX specification; or its functions would fill the memory.
    """
    if fault := _bad_text(model) or next(_faults(model), ""):
        raise unreadable(f"{where} is not a valid ONNX model: {fault}", "export it again")
    check_structure(model, where)
    if model.functions:
        check_growth(model.functions, model.graph.node)


def check_structure(model: ModelProto, where: str = "the model") -> None:
    """Check a model with onnx.checker, without its weights.

    Faults that onnxruntime accepts are ignored (see `ir.dialects`).

    Raises:
        OnnxgradError: the model breaks the ONNX specification.
    """
    bare = skeleton(model)
    for tensor in tensors(bare):
        if is_external(tensor):  # in a node's attribute, where the checker would look for the file
            tensor.ClearField("data_location")
            tensor.ClearField("external_data")
            tensor.dims[:] = [0]
    repair(bare)
    if fault := checker_error(bare):
        raise unreadable(f"{where} is not a valid ONNX model: {fault}", "export it again")


def _bad_text(message: Message) -> str:
    """Return a description of the first text in a protobuf message that is not UTF-8, such as a name; "" if none is."""
    for field, value in message.ListFields():
        if field.name in FOR_PEOPLE or field.type not in (field.TYPE_STRING, field.TYPE_MESSAGE):
            continue
        for each in value if field.is_repeated else (value,):
            if isinstance(each, Message):
                if found := _bad_text(each):
                    return found
            elif isinstance(each, bytes):  # protobuf returns bytes where it can't decode a text
                return f"'{field.full_name}' is not UTF-8: {each[:100]!r}"
    return ""


def _faults(model: ModelProto) -> Iterator[str]:
    """Yield a description of each fault in the declared types and in the tensors of a model."""
    graph = model.graph
    dense = {tensor.name for tensor in graph.initializer}
    for value in (*graph.input, *graph.output, *graph.value_info):
        axes = len(value.type.tensor_type.shape.dim)
        if axes > MAX_AXES:
            yield f"value '{value.name}' has {axes:,} axes; arrays have at most {MAX_AXES}"
        dtype = dtype_of(element_type(value.type))
        if dtype and dtype not in KNOWN:
            yield f"value '{value.name}' has elements of the unknown type {dtype}"
    for value in graph.input:
        typed = dtype_of(element_type(value.type)) or value.type.WhichOneof("value") in (
            "map_type",
            "sparse_tensor_type",
        )
        if not typed and value.name not in dense:
            yield f"the input '{value.name}' has no element type"
    for tensor in tensors(model):
        if fault := _fault(tensor):
            yield f"tensor '{tensor.name}' {fault}" if tensor.name else f"a tensor without a name {fault}"
    for sparse in graph.sparse_initializer:
        if sparse.values.name in dense:
            yield f"it stores '{sparse.values.name}' twice, as a dense and as a sparse tensor"
        yield from _sparse_faults(sparse)


def _sparse_faults(sparse: SparseTensorProto) -> Iterator[str]:
    """Yield a description of the fault that onnx.checker finds in a sparse initializer, if any."""
    if is_external(sparse.values) or is_external(sparse.indices):
        return
    try:
        onnx.checker.check_sparse_tensor(sparse)
    except onnx.checker.ValidationError as error:
        yield f"sparse tensor '{sparse.values.name}': {error}"


def _fault(tensor: TensorProto) -> str:
    """Return a description of the fault in a tensor's elements, or "" if they have none."""
    if tensor.data_type not in KNOWN:
        return f"has elements of the unknown type {tensor.data_type}"
    dims = list(tensor.dims)
    if len(dims) > MAX_AXES:
        return f"has {len(dims):,} axes; arrays have at most {MAX_AXES}"
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
