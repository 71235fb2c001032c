"""Write models and other files atomically. Only files that onnxgrad wrote are replaced."""

from __future__ import annotations

import os
import sys
import zipfile
from collections.abc import Callable, Iterable, Mapping
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import numpy as np
from onnx import ModelProto, TensorProto, numpy_helper

from onnxgrad_cli.common.packages import tool_version
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.files.external_data import check_data, is_inside, refer, relocated, tensors
from onnxgrad_cli.files.outputs import check_target
from onnxgrad_cli.files.reading import STREAM
from onnxgrad_cli.files.transaction import AtomicWriteGroup
from onnxgrad_cli.ir.types import MAX_SHAPE_BYTES, is_external, nbytes
from onnxgrad_cli.metadata import VERSION

PROTOBUF_LIMIT = 2**31 - 2**26
"""If a model's inline weights have more bytes than this, they become external data. protobuf's limit is 2 GB."""

ALIGNMENT = 4096
"""Alignment of tensors in a data file, in bytes. It is the size of a page, so that runtimes can memory-map tensors."""


OURS = b"written by onnxgrad"
"""The comment in a zip archive that marks it as written by onnxgrad, so that it may be replaced."""

Check = Callable[[Path], object]
"""A function that checks a written file before it gets its final name. If it raises an error, nothing is written."""


def save_model(
    model: ModelProto,
    out: str | Path,
    source: Path | None = None,
    force: bool = False,
    copy_data: bool = True,
    check: Check | None = None,
) -> list[Path]:
    """Write a model atomically.

    If `out` is in the folder of `source`, external data stay references. Otherwise the data files are copied to the
    folder of `out`. Inline weights that are too large for protobuf are moved to a data file; this also changes `model`.
    Copied and new data files are called `<out>.<12 digits>.data`, with digits of a digest of their content.

    Args:
        out: the file; '-' is stdout. On stdout, external data stay references.
        source: the file that the model was read from. This file and its data files are never overwritten.
        force: replace files that onnxgrad did not write.
        copy_data: True to copy external data to another folder.
        check: called with the written file before it is renamed.

    Returns:
        The files written, the model first, then its data files.

    Raises:
        UsageError: `out` is an input, or exists, was not written by onnxgrad, and `force` is False.
        OnnxgradError: the file can't be written, or another process writes it.
    """
    if str(out) == STREAM:
        mark(model)
        write_stdout(model.SerializeToString())
        return []
    out = Path(out)
    check_target(out, model, source, force)
    with AtomicWriteGroup(out) as switch:
        files = stage_model(switch, model, out, source, copy_data, check)
        switch.commit()
    return files


def stage_model(
    switch: AtomicWriteGroup,
    model: ModelProto,
    out: Path,
    source: Path | None = None,
    copy_data: bool = True,
    check: Check | None = None,
) -> list[Path]:
    """Add a model to a group of files. Whether an existing file may be replaced is not checked. See `save_model`."""
    mark(model)
    stored = tensors(model)
    moved = _copy_data(switch, filter(is_external, stored), source, out.parent) if copy_data else {}
    data = [*moved.values(), *_move_weights(switch, stored)]
    with relocated(filter(is_external, stored), {location: file.name for location, file in moved.items()}):
        switch.stage(out, lambda file: file.write(model.SerializeToString()))
    if check:
        check(switch.where(out))
    return [out, *data]


def save_bytes(data: bytes, out: Path, durable: bool = False) -> None:
    """Write a file atomically.

    Args:
        data: the content.
        out: the file.
        durable: see `AtomicWriteGroup.stage`.

    Raises:
        OnnxgradError: the file can't be written, or another process writes it.
    """
    with AtomicWriteGroup(out) as switch:
        switch.stage(out, lambda file: file.write(data), durable)
        switch.commit()


def write_npz(arrays: Mapping[str, np.ndarray], stream: BinaryIO) -> None:
    """Write arrays as numpy.savez does, but with any names.

    Args:
        arrays: name -> array.
        stream: the stream to write to.

    Raises:
        ValueError: an array holds Python objects.
    """
    with zipfile.ZipFile(stream, "w") as archive:
        archive.comment = OURS
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, array, allow_pickle=False)


def npz_bytes(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Return the content of an .npz file with arrays; see `write_npz`."""
    stream = BytesIO()
    write_npz(arrays, stream)
    return stream.getvalue()


def write_stdout(data: bytes) -> None:
    """Write bytes to stdout.

    Raises:
        UsageError: stdout is a terminal.
    """
    if sys.stdout.isatty():
        raise UsageError(
            "a model can't be written to a terminal", "redirect stdout, or name a file with -o", code="unwritable_file"
        )
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def mark(model: ModelProto) -> None:
    """Add metadata to a model that mark it as written by onnxgrad."""
    if not any(entry.key == VERSION for entry in model.metadata_props):
        model.metadata_props.add(key=VERSION, value=tool_version())


def _copy_data(
    switch: AtomicWriteGroup, external: Iterable[TensorProto], source: Path | None, folder: Path
) -> dict[str, Path]:
    """Copy the data files of external tensors to a new folder, unless the references already work from there.

    Returns:
        Location of a file that was copied -> the copy.
    """
    origin, moved = source.parent if source else Path(), {}
    for location in check_data(external, source):
        data, there = origin / location, folder / location
        if not (is_inside(there, folder) and there.exists() and there.samefile(data)):
            moved[location] = switch.copy_data(data)
    return moved


def _move_weights(switch: AtomicWriteGroup, stored: Iterable[TensorProto]) -> list[Path]:
    """Move the inline tensors of a model to a data file, if they are too large for protobuf.

    Return the data file, if any.
    """
    inline = [t for t in stored if not is_external(t) and t.data_type != TensorProto.STRING]
    if sum(nbytes(tensor) for tensor in inline) <= PROTOBUF_LIMIT:
        return []
    places: list[tuple[TensorProto, int, int]] = []

    def write(file: BinaryIO) -> None:
        for tensor in inline:
            if nbytes(tensor) > MAX_SHAPE_BYTES:
                offset = file.seek(-file.tell() % ALIGNMENT, os.SEEK_CUR)
                raw = tensor.raw_data or numpy_helper.from_array(numpy_helper.to_array(tensor)).raw_data
                places.append((tensor, offset, file.write(raw)))

    data = switch.write_data(write)
    for tensor, offset, length in places:
        for field in ("raw_data", "float_data", "double_data", "int32_data", "int64_data", "uint64_data"):
            tensor.ClearField(field)
        refer(tensor, data.name, offset, length)
    return [data]
