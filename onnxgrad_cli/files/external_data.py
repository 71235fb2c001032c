"""External data: tensors that lie in files beside the model, referred to by location, offset and length."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto

from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.ir.nodes import subgraphs
from onnxgrad_cli.ir.types import is_external, nbytes


def tensors(model: ModelProto) -> Iterator[TensorProto]:
    """Every tensor of a model: initializers and attributes, of subgraphs, functions and training information too."""
    yield from _graph_tensors(model.graph)
    for info in model.training_info:
        yield from _graph_tensors(info.initialization)
        yield from _graph_tensors(info.algorithm)
    for function in model.functions:
        for node in function.node:
            yield from _node_tensors(node)


def _graph_tensors(graph: GraphProto) -> Iterator[TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    for node in graph.node:
        if node.attribute:
            yield from _node_tensors(node)


_NUMBERS = frozenset({AttributeProto.INT, AttributeProto.INTS, AttributeProto.FLOAT, AttributeProto.FLOATS})
"""What most attributes are."""


def _node_tensors(node: NodeProto) -> Iterator[TensorProto]:
    for attribute in node.attribute:
        if attribute.type in _NUMBERS:
            continue
        if attribute.HasField("t"):
            yield attribute.t
        yield from attribute.tensors
    for graph in subgraphs(node):
        yield from _graph_tensors(graph)


@dataclass(frozen=True)
class Reference:
    """Where an external tensor lies: file relative to the model's folder, first byte, number of bytes."""

    tensor: str
    location: str
    offset: int
    length: int


def references(model: ModelProto) -> Iterator[Reference]:
    """The external tensors of a model.

    Raises:
        OnnxgradError: a reference contradicts itself.
    """
    for tensor in tensors(model):
        if not is_external(tensor):
            continue
        entries = {entry.key: entry.value for entry in tensor.external_data}
        needed = _packed_bytes(tensor)
        try:
            offset, length = int(entries.get("offset", 0)), int(entries.get("length", needed))
        except ValueError:
            offset = length = -1
        if not entries.get("location") or offset < 0 or length != needed:
            raise OnnxgradError(
                f"tensor '{tensor.name}' has {needed:,} bytes, its external data can't be right: {entries}",
                "export the model again",
            )
        yield Reference(tensor.name, entries["location"], offset, length)


def _packed_bytes(tensor: TensorProto) -> int:
    """The size of a tensor in a file, where elements of four bits share bytes."""
    bits = {"INT4": 4, "UINT4": 4, "FLOAT4E2M1": 4, "INT2": 2, "UINT2": 2}
    width = bits.get(TensorProto.DataType.Name(tensor.data_type), 8)
    return (nbytes(tensor) * width + 7) // 8


def check_external_data(model: ModelProto, path: Path | None) -> list[str]:
    """Make sure that every external tensor lies complete in a file inside the model's folder.

    Returns:
        The files, relative to that folder, in the order of their first use.

    Raises:
        OnnxgradError: a file is missing, too short, or outside the folder.
    """
    folder = path.parent if path else Path()
    sizes: dict[str, int] = {}
    for reference in references(model):
        if reference.location not in sizes:
            sizes[reference.location] = _data_size(reference, folder, path)
        size, end = sizes[reference.location], reference.offset + reference.length
        if end > size:
            raise OnnxgradError(
                f"external data file '{folder / reference.location}' is cut short: '{reference.tensor}' "
                f"ends at byte {end:,}, the file has {size:,}",
                "copy or export it again",
            )
    return list(sizes)


def _data_size(reference: Reference, folder: Path, path: Path | None) -> int:
    file = folder / reference.location
    allowed = {folder.resolve(), (path or file).resolve().parent}  # a linked model may have its data there
    if os.path.isabs(reference.location) or not any(file.resolve().is_relative_to(f) for f in allowed):
        raise OnnxgradError(
            f"tensor '{reference.tensor}' has its data outside the model's folder: '{reference.location}'",
            "this is refused, as onnxruntime does; put the data file beside the model",
        )
    if not file.is_file():
        raise OnnxgradError(
            f"external data file '{file}' is missing: tensor '{reference.tensor}' lies there",
            "put it beside the model, under the name that the model knows",
        )
    return file.stat().st_size


def load_external_data(model: ModelProto, path: Path | None) -> None:
    """Read a model's external data into it, for what must compute with them.

    Raises:
        OnnxgradError: see `check_external_data`.
    """
    check_external_data(model, path)
    folder = path.parent if path else Path()
    for reference, tensor in zip(list(references(model)), filter(is_external, tensors(model)), strict=True):
        with (folder / reference.location).open("rb") as file:
            file.seek(reference.offset)
            tensor.raw_data = file.read(reference.length)
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")
