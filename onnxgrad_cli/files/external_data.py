"""External data: tensors in files beside the model, which refers to them by location, offset and length."""

from __future__ import annotations

import os
import re
import shlex
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto

from onnxgrad_cli.errors import OnnxgradError, missing_file, unreadable
from onnxgrad_cli.ir.node_values import subgraphs
from onnxgrad_cli.ir.types import is_external, packed_bytes

CHECKED_BLOCK = 2**24
"""Number of bytes that are read at once to compute the checksum of a file."""


def tensors(model: ModelProto) -> list[TensorProto]:
    """Return every tensor of a model, including those in attributes, subgraphs, functions and training information."""
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
"""The types of attributes that contain no tensors."""


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
    """The location of an external tensor: file (relative to the model's folder), first byte and number of bytes."""

    tensor: str
    location: str
    offset: int
    length: int


def external_tensors(model: ModelProto) -> Iterator[TensorProto]:
    """Return the tensors of a model that are stored in files beside it."""
    return filter(is_external, tensors(model))


def reference_of(tensor: TensorProto) -> Reference:
    """Return the location of an external tensor.

    Raises:
        OnnxgradError: the entries of the reference are contradictory or impossible, or its location is not a relative
            path inside the model's folder.
    """
    needed = packed_bytes(tensor)
    entries: dict[str, str] = {}
    for entry in tensor.external_data:
        # onnx reads the last entry; onnxruntime rejects some such files
        if entries.setdefault(entry.key, entry.value) != entry.value:
            raise unreadable(
                f"the external data of tensor '{tensor.name}' have two {entry.key}s", "export the model again"
            )
    try:
        offset, length = int(entries.get("offset", 0)), int(entries.get("length", needed))
    except ValueError:
        offset = length = -1
    if not entries.get("location") or offset < 0 or length != needed:
        raise unreadable(
            f"tensor '{tensor.name}' has {needed:,} bytes, but its external data are described otherwise: {entries}",
            "export the model again",
        )
    return Reference(tensor.name, _plain(entries["location"], tensor.name), offset, length)


_DRIVE = re.compile("[A-Za-z]:")


def _plain(location: str, tensor: str) -> str:
    """Return a location as a normalized path, after checking that it is inside the model's folder on every system."""
    path = PurePosixPath(location)
    outside = ".." in path.parts or path.is_absolute() or "\\" in location or _DRIVE.match(location)
    if outside or "\0" in location or not path.name:
        raise unreadable(
            f"the external data of tensor '{tensor}' are outside the model's folder, or not a plain name: "
            f"{location[:100]!r}",
            "put the data file beside the model, and export the model with the file's name as the location",
        )
    return str(path)


def restate_references(external: Iterable[TensorProto]) -> None:
    """Rewrite each reference in place in the form that every reader understands: one location, offset and length.

    Args:
        external: the external tensors of a model.

    Raises:
        OnnxgradError: see `reference_of`.
    """
    for tensor in external:
        found = reference_of(tensor)
        refer(tensor, found.location, found.offset, found.length)


@contextmanager
def relocated(external: Iterable[TensorProto], moved: Mapping[str, str]) -> Iterator[None]:
    """Point external tensors to other files within the block, and restore them after it.

    Args:
        external: the tensors.
        moved: old location -> new location.

    Raises:
        OnnxgradError: see `reference_of`.
    """
    before = [(tensor, reference_of(tensor)) for tensor in external]
    for tensor, found in before:
        refer(tensor, moved.get(found.location, found.location), found.offset, found.length)
    try:
        yield
    finally:
        for tensor, found in before:
            refer(tensor, found.location, found.offset, found.length)


@contextmanager
def without_links(model: ModelProto, path: Path | None) -> Iterator[Path]:
    """In the block, a model's references avoid symbolic links. After it, the references are restored.

    onnxruntime rejects links that lead out of the model's folder, but model hubs use such links in their caches.

    Args:
        model: the model.
        path: the file that the model was read from.

    Yields:
        The folder that the references are relative to: the model's folder, or one that contains all its data files.

    Raises:
        OnnxgradError: see `check_external_data`.
    """
    check_external_data(model, path)
    folder = path.parent if path else Path()
    places = {
        reference.location: _real(folder / reference.location)
        for reference in map(reference_of, external_tensors(model))
    }
    if all(place.is_relative_to(_real(folder)) for place in places.values()):
        yield folder
        return
    common = Path(os.path.commonpath([place.parent for place in places.values()]))
    moved = {name: place.relative_to(common).as_posix() for name, place in places.items()}
    with relocated(external_tensors(model), moved):
        yield common


def refer(tensor: TensorProto, location: str, offset: int, length: int) -> None:
    """Make a tensor external: it refers to bytes in the file `location`. Other entries of its reference are removed."""
    tensor.data_location = TensorProto.EXTERNAL
    tensor.ClearField("external_data")
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))


def check_external_data(model: ModelProto, path: Path | None) -> list[str]:
    """Check that every external tensor is stored completely in a file inside the model's folder.

    Returns:
        The data files, relative to the model's folder, in the order of their first use.

    Raises:
        OnnxgradError: a data file is missing, too short, or outside the folder.
    """
    return check_data(external_tensors(model), path)


def check_data(external: Iterable[TensorProto], path: Path | None) -> list[str]:
    """Check the data files of some external tensors of a model; see `check_external_data`."""
    folder = path.parent if path else Path()
    sizes: dict[str, int] = {}
    for reference in map(reference_of, external):
        if reference.location not in sizes:
            sizes[reference.location] = _data_size(reference, folder, path)
        size, end = sizes[reference.location], reference.offset + reference.length
        if end > size:
            raise unreadable(
                f"external data file '{folder / reference.location}' is cut short: tensor '{reference.tensor}' "
                f"ends at byte {end:,}, but the file has {size:,} bytes",
                "copy or export it again",
            )
    return list(sizes)


def _data_size(reference: Reference, folder: Path, path: Path | None) -> int:
    file = folder / reference.location
    # the data of a model that is a link may be beside the link or beside its target
    homes = (folder, _real(path or file).parent)
    if not any(is_inside(file, home) for home in homes):
        raise unreadable(
            f"the external data of tensor '{reference.tensor}' are outside the model's folder: '{reference.location}'",
            "put the data file beside the model; onnxruntime refuses other places too",
        )
    try:
        found = file.stat()
    except FileNotFoundError:
        raise missing_file(
            f"external data file '{file}' is missing; it stores tensor '{reference.tensor}'",
            "copy the file to this place",
        ) from None
    except OSError as error:
        raise _unreadable(reference, error.strerror) from None
    if not stat.S_ISREG(found.st_mode):
        raise _unreadable(reference, "it is not a regular file")
    # the other name may be anywhere: an attacker's archive can contain hard links to the user's own files
    if found.st_nlink > 1:
        copied = shlex.quote(f"{file}.copy")
        raise unreadable(
            f"external data file '{file}' has {found.st_nlink} names (hard links), so it may come from outside the "
            f"model's folder; it stores tensor '{reference.tensor}'",
            f"if you trust the model, copy the file: cp {shlex.quote(str(file))} {copied} && "
            f"mv -f {copied} {shlex.quote(str(file))}",
        )
    return found.st_size


def is_inside(file: Path, folder: Path) -> bool:
    """Return True if a file is in a folder or below it, after links in both paths are resolved."""
    return _real(file).is_relative_to(_real(folder))


def _real(path: Path) -> Path:
    """Return a path with its links resolved.

    For a loop of links, the result is partial; `Path.resolve` may raise an error.
    """
    return Path(os.path.realpath(path))


def _unreadable(reference: Reference, why: str | None) -> OnnxgradError:
    return unreadable(
        f"external data file '{reference.location[:100]}' can't be read: {why}; it stores tensor '{reference.tensor}'",
        "put the data file beside the model, and export the model with the file's name as the location",
    )


def data_checksum(tensor: TensorProto, path: Path | None, start: int = 0) -> int:
    """Return the CRC-32 of the bytes of an external tensor. `start` is the CRC-32 to continue.

    Args:
        tensor: the tensor; see `check_external_data`.
        path: the file of the tensor's model.
        start: the checksum of the preceding data.

    Raises:
        OnnxgradError: the file can't be read.
    """
    reference, check = reference_of(tensor), start
    try:
        with ((path.parent if path else Path()) / reference.location).open("rb") as file:
            file.seek(reference.offset)
            left = reference.length
            while block := file.read(min(left, CHECKED_BLOCK)):
                check, left = zlib.crc32(block, check), left - len(block)
    except OSError as error:
        raise _unreadable(reference, error.strerror) from None
    return check


def load_external_data(model: ModelProto, path: Path | None) -> None:
    """Load external data into a model, for code that computes with the values.

    Raises:
        OnnxgradError: see `check_external_data`.
    """
    check_external_data(model, path)
    folder = path.parent if path else Path()
    for tensor in external_tensors(model):
        reference = reference_of(tensor)
        try:
            with (folder / reference.location).open("rb") as file:
                file.seek(reference.offset)
                tensor.raw_data = file.read(reference.length)
        except OSError as error:
            raise _unreadable(reference, error.strerror) from None
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")
