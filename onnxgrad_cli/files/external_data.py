"""External data: tensors that lie in files beside the model, referred to by location, offset and length."""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto

from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.ir.nodes import subgraphs
from onnxgrad_cli.ir.types import is_external, packed_bytes


def tensors(model: ModelProto) -> list[TensorProto]:
    """Every tensor of a model: initializers and attributes, of subgraphs, functions and training information too."""
    found = _graph_tensors(model.graph)
    for info in model.training_info:
        found += _graph_tensors(info.initialization)
        found += _graph_tensors(info.algorithm)
    for function in model.functions:
        for node in function.node:
            found += _node_tensors(node)
    return found


def _graph_tensors(graph: GraphProto) -> list[TensorProto]:
    found = list(graph.initializer)
    for sparse in graph.sparse_initializer:
        found += (sparse.values, sparse.indices)
    for node in graph.node:
        if node.attribute:
            found += _node_tensors(node)
    return found


_NUMBERS = frozenset({AttributeProto.INT, AttributeProto.INTS, AttributeProto.FLOAT, AttributeProto.FLOATS})
"""What most attributes are."""


def _node_tensors(node: NodeProto) -> list[TensorProto]:
    found: list[TensorProto] = []
    for attribute in node.attribute:
        if attribute.type in _NUMBERS:
            continue
        if attribute.HasField("t"):
            found.append(attribute.t)
        found += attribute.tensors
    for graph in subgraphs(node):
        found += _graph_tensors(graph)
    return found


class Reference(NamedTuple):
    """Where an external tensor lies: file relative to the model's folder, first byte, number of bytes."""

    tensor: str
    location: str
    offset: int
    length: int


def external_tensors(model: ModelProto) -> Iterator[TensorProto]:
    """The tensors of a model that lie in files beside it."""
    return filter(is_external, tensors(model))


def references(model: ModelProto) -> Iterator[Reference]:
    """The external tensors of a model.

    Raises:
        OnnxgradError: a reference contradicts itself, or names a file by anything but a plain relative path.
    """
    return map(_reference, external_tensors(model))


def _reference(tensor: TensorProto) -> Reference:
    needed = packed_bytes(tensor)
    entries: dict[str, str] = {}
    for entry in tensor.external_data:
        if entries.setdefault(entry.key, entry.value) != entry.value:  # onnx reads the last, onnxruntime not every file
            raise OnnxgradError(f"the external data of tensor '{tensor.name}' have two {entry.key}s", "export it again")
    try:
        offset, length = int(entries.get("offset", 0)), int(entries.get("length", needed))
    except ValueError:
        offset = length = -1
    if not entries.get("location") or offset < 0 or length != needed:
        raise OnnxgradError(
            f"tensor '{tensor.name}' has {needed:,} bytes, its external data can't be right: {entries}",
            "export the model again",
        )
    return Reference(tensor.name, _plain(entries["location"], tensor.name), offset, length)


_DRIVE = re.compile("[A-Za-z]:")


def _plain(location: str, tensor: str) -> str:
    """A location as a relative path that means the same file on every system, inside the model's folder."""
    path = PurePosixPath(location)
    outside = ".." in path.parts or path.is_absolute() or "\\" in location or _DRIVE.match(location)
    if outside or "\0" in location or not path.name:
        raise OnnxgradError(
            f"tensor '{tensor}' has its data outside the model's folder, or under no plain name: {location[:100]!r}",
            "put the data file beside the model, and let the model know it by its name alone",
        )
    return str(path)


def restate_references(external: Iterable[TensorProto]) -> None:
    """Write each reference anew, in place: location, offset and length, once each, in the form that every reader reads.

    Args:
        external: the external tensors of a model.

    Raises:
        OnnxgradError: see `references`.
    """
    for tensor in external:
        found = _reference(tensor)
        refer(tensor, found.location, found.offset, found.length)


@contextmanager
def relocated(external: Iterable[TensorProto], moved: Mapping[str, str]) -> Iterator[None]:
    """External tensors whose references, for as long as the block runs, are to other places.

    Args:
        external: the tensors.
        moved: location -> the other one.

    Raises:
        OnnxgradError: see `references`.
    """
    before = [(tensor, _reference(tensor)) for tensor in external]
    for tensor, found in before:
        refer(tensor, moved.get(found.location, found.location), found.offset, found.length)
    try:
        yield
    finally:
        for tensor, found in before:
            refer(tensor, found.location, found.offset, found.length)


@contextmanager
def without_links(model: ModelProto, path: Path | None) -> Iterator[Path]:
    """A model that, for as long as the block runs, finds its external data through no link out of its folder.

    onnxruntime follows none, and caches of hubs consist of them.

    Args:
        model: the model.
        path: where it was read from.

    Yields:
        The folder that its references are relative to: its own, or one that has all its data below it.

    Raises:
        OnnxgradError: see `check_external_data`.
    """
    check_external_data(model, path)
    folder = path.parent if path else Path()
    places = {reference.location: _real(folder / reference.location) for reference in references(model)}
    if all(place.is_relative_to(_real(folder)) for place in places.values()):
        yield folder
        return
    common = Path(os.path.commonpath([place.parent for place in places.values()]))
    moved = {name: place.relative_to(common).as_posix() for name, place in places.items()}
    with relocated(external_tensors(model), moved):
        yield common


def refer(tensor: TensorProto, location: str, offset: int, length: int) -> None:
    """Let a tensor lie in another file, where it is named by nothing but these entries."""
    tensor.data_location = TensorProto.EXTERNAL
    tensor.ClearField("external_data")
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))


def check_external_data(model: ModelProto, path: Path | None) -> list[str]:
    """Make sure that every external tensor lies complete in a file inside the model's folder.

    Returns:
        The files, relative to that folder, in the order of their first use.

    Raises:
        OnnxgradError: a file is missing, too short, or outside the folder.
    """
    return check_data(external_tensors(model), path)


def check_data(external: Iterable[TensorProto], path: Path | None) -> list[str]:
    """The same of some external tensors of a model."""
    folder = path.parent if path else Path()
    sizes: dict[str, int] = {}
    for reference in map(_reference, external):
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
    homes = (folder, _real(path or file).parent)  # a model that is a link may have its data beside what it links to
    if not any(is_inside(file, home) for home in homes):
        raise OnnxgradError(
            f"tensor '{reference.tensor}' has its data outside the model's folder: '{reference.location}'",
            "this is refused, as onnxruntime does; put the data file beside the model",
        )
    try:
        found = file.stat()
    except FileNotFoundError:
        raise OnnxgradError(
            f"external data file '{file}' is missing: tensor '{reference.tensor}' lies there",
            "put it beside the model, under the name that the model knows",
        ) from None
    except OSError as error:
        raise _unreadable(reference, error.strerror) from None
    if not stat.S_ISREG(found.st_mode):
        raise _unreadable(reference, "it is no regular file")
    if found.st_nlink > 1:  # the other name may be anywhere: a stranger's archive can link to the user's own files
        copied = shlex.quote(f"{file}.copy")
        raise OnnxgradError(
            f"external data file '{file}' has {found.st_nlink} names (hard links), so it may come from outside the "
            f"model's folder; tensor '{reference.tensor}' lies there",
            f"if you trust the model, copy the file: cp {shlex.quote(str(file))} {copied} && "
            f"mv -f {copied} {shlex.quote(str(file))}",
        )
    return found.st_size


def is_inside(file: Path, folder: Path) -> bool:
    """Whether a file lies in a folder, or in one below it, when all links are followed."""
    return _real(file).is_relative_to(_real(folder))


def _real(path: Path) -> Path:
    """A path without links; of a loop of links as far as it goes, where `Path.resolve` may raise."""
    return Path(os.path.realpath(path))


def _unreadable(reference: Reference, why: str | None) -> OnnxgradError:
    return OnnxgradError(
        f"external data file '{reference.location[:100]}' can't be read: {why}; tensor '{reference.tensor}' lies there",
        "put the data file beside the model, and let the model know it by its name alone",
    )


def load_external_data(model: ModelProto, path: Path | None) -> None:
    """Read a model's external data into it, for what must compute with them.

    Raises:
        OnnxgradError: see `check_external_data`.
    """
    check_external_data(model, path)
    folder = path.parent if path else Path()
    for tensor in external_tensors(model):
        reference = _reference(tensor)
        try:
            with (folder / reference.location).open("rb") as file:
                file.seek(reference.offset)
                tensor.raw_data = file.read(reference.length)
        except OSError as error:
            raise _unreadable(reference, error.strerror) from None
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")
