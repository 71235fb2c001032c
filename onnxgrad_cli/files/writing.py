"""Files are written whole or not at all, and only over what onnxgrad has written before."""

from __future__ import annotations

import errno
import filecmp
import mmap
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from onnx import ModelProto, TensorProto, numpy_helper

from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.files.external_data import check_external_data, references, tensors
from onnxgrad_cli.files.reading import STREAM
from onnxgrad_cli.ir.types import SMALL, is_external, nbytes
from onnxgrad_cli.metadata import VERSION, tool_version

PROTOBUF_LIMIT = 2**31 - 2**26
"""Bytes of inline weights above which a model goes out with external data: protobuf ends at 2 GB."""

ALIGNMENT = 4096
"""Bytes. Tensors in a data file start at multiples of a page, so that a runtime can map them."""


def save_model(
    model: ModelProto,
    out: str | Path,
    source: Path | None = None,
    force: bool = False,
    copy_data: bool = True,
) -> list[Path]:
    """Write a model, whole or not at all.

    External data stay references where `out` lies in the folder of `source`; else the data files are copied
    beside it. Inline weights too large for protobuf are moved to `<out>.data`, in `model` too.

    Args:
        out: the file; '-' is stdout, where external data stay references.
        source: the file the model was read from; it is never overwritten, nor are its data.
        force: replace files that onnxgrad did not write.
        copy_data: whether external data are copied to another folder.

    Returns:
        The files written, the model first.

    Raises:
        UsageError: `out` is the input, or a file that onnxgrad did not write.
        OnnxgradError: it can't be written.
    """
    mark(model)
    if str(out) == STREAM:
        write_stdout(model.SerializeToString())
        return []
    out = Path(out)
    check_target(out, model, source, force)
    with told(out), ExitStack() as undo:
        data = _place_data(model, source, out.parent, force, undo) if copy_data else []
        data += _move_weights(model, out, force, undo)
        _write(out, lambda file: file.write(model.SerializeToString()), undo)
        undo.pop_all()
    return [out, *data]


def save_bytes(data: bytes, out: Path, durable: bool = False) -> None:
    """Write a file, whole or not at all.

    Args:
        data: what is in it.
        out: the file.
        durable: wait until the disk has it, so that it outlives a loss of power too. What is not durable is whole
            for whoever reads it while the machine runs.

    Raises:
        OnnxgradError: it can't be written.
    """
    with told(out), ExitStack() as undo:
        _write(out, lambda file: file.write(data), undo, durable)
        undo.pop_all()


def write_stdout(data: bytes) -> None:
    """Write bytes to stdout.

    Raises:
        UsageError: stdout is a terminal.
    """
    if sys.stdout.isatty():
        raise UsageError("a model is not written to a terminal", "redirect stdout, or name a file with -o")
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def mark(model: ModelProto) -> None:
    """Say in the model's metadata that onnxgrad wrote it."""
    if not any(entry.key == VERSION for entry in model.metadata_props):
        model.metadata_props.add(key=VERSION, value=tool_version())


def check_target(out: Path, model: ModelProto | None = None, source: Path | None = None, force: bool = False) -> None:
    """Make sure that `out` may be written, before any work is done for it.

    Args:
        model, source: the input: neither it nor its external data are ever overwritten.
        force: replace a file that onnxgrad did not write.

    Raises:
        UsageError: `out` is the input, or a file that onnxgrad did not write.
        OnnxgradError: it can't be written.
    """
    if source is not None and out.exists():
        data = [source.parent / reference.location for reference in references(model)] if model else []
        for file in (source, *dict.fromkeys(data)):
            if file.exists() and out.samefile(file):
                raise UsageError(f"'{out}' is the input, which is never overwritten", "name another file")
    if out.is_dir():
        raise OnnxgradError(f"'{out}' is a directory", f"name a file in it: {out / 'model.train.onnx'}")
    if not out.parent.is_dir():
        raise OnnxgradError(f"there is no folder '{out.parent}' to write '{out.name}' to", "make it first")
    if not os.access(out.parent if _replaceable(out) else out, os.W_OK):
        raise OnnxgradError(f"'{out}' can't be written: permission denied", "choose another place with -o")
    if out.is_file() and not force and not is_ours(out):
        raise UsageError(f"'{out}' exists, and onnxgrad did not write it", "replace it with `force=True`")


def _replaceable(out: Path) -> bool:
    """Whether `out` is, or will be, a regular file; a device or a pipe is written to directly."""
    return not out.exists() or out.is_file()


def is_ours(path: Path) -> bool:
    """Whether onnxgrad wrote a file: a report says so in its head, a model in its metadata.

    These stand near its end, but for training information and functions, which come after them.
    """
    with path.open("rb") as file:
        head = file.read(4096)
        if not head.startswith(b"\x08"):  # the first byte of every ONNX model
            return not head or b"onnxgrad" in head
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return data.rfind(VERSION.encode()) >= 0


def _write(out: Path, write: Callable[[BinaryIO], object], undo: ExitStack, durable: bool = False) -> None:
    """Write a file under a temporary name beside `out`, then rename it; `undo` removes it if it is new."""
    if not _replaceable(out):
        with out.open("wb") as file:
            write(file)
        return
    temporary = out.with_name(f".{out.name[:200]}.{os.getpid()}.tmp")
    with ExitStack() as unfinished:
        unfinished.callback(temporary.unlink, missing_ok=True)
        with temporary.open("wb") as file:
            write(file)
            if durable:  # before the rename: a disk may take the new name first, and then has an empty file
                file.flush()
                os.fsync(file.fileno())
        if not out.exists():
            undo.callback(out.unlink, missing_ok=True)
        temporary.replace(out)
        if durable and os.name != "nt":
            _sync_names(out.parent)


def _sync_names(folder: Path) -> None:
    """Wait until the disk has the names of a folder's files, where the file system lets a folder be asked for that."""
    with suppress(PermissionError):  # who may write in a folder need not be one who may read it
        place = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(place)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
                raise
        finally:
            os.close(place)


def _place_data(model: ModelProto, source: Path | None, folder: Path, force: bool, undo: ExitStack) -> list[Path]:
    """Copy the external data beside a model that is written to another folder."""
    origin = source.parent if source else Path()
    if origin.resolve() == folder.resolve():
        return []
    placed = []
    for location in check_external_data(model, source):
        data, target = origin / location, folder / location
        if target.exists() and (target.samefile(data) or filecmp.cmp(target, data, shallow=False)):
            continue
        if target.exists() and not force:
            raise UsageError(
                f"the model's data file '{location}' must lie beside it, and '{target}' is another file",
                "choose another folder with -o, or replace the file with `force=True`",
            )
        for parent in reversed(target.parents):
            if not parent.exists():
                parent.mkdir()
                undo.callback(parent.rmdir)
        with data.open("rb") as stream:
            _write(target, partial(shutil.copyfileobj, stream), undo)
        placed.append(target)
    return placed


def _move_weights(model: ModelProto, out: Path, force: bool, undo: ExitStack) -> list[Path]:
    """Move inline weights to a data file where they are too large for protobuf."""
    inline = [t for t in tensors(model) if not is_external(t) and t.data_type != TensorProto.STRING]
    if sum(nbytes(tensor) for tensor in inline) <= PROTOBUF_LIMIT:
        return []
    target = out.with_name(f"{out.name}.data")
    if target.exists() and not force and not (out.is_file() and is_ours(out)):
        raise UsageError(f"'{target}' exists, and the weights must go there", "replace it with `force=True`")
    places: list[tuple[TensorProto, int, int]] = []

    def write(file: BinaryIO) -> None:
        for tensor in inline:
            if nbytes(tensor) > SMALL:
                offset = file.seek(-file.tell() % ALIGNMENT, os.SEEK_CUR)
                raw = tensor.raw_data or numpy_helper.from_array(numpy_helper.to_array(tensor)).raw_data
                places.append((tensor, offset, file.write(raw)))

    _write(target, write, undo)
    for tensor, offset, length in places:
        for field in ("raw_data", "float_data", "double_data", "int32_data", "int64_data", "uint64_data"):
            tensor.ClearField(field)
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", target.name), ("offset", offset), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))
    return [target]


def make_folder(folder: Path, option: str) -> None:
    """Make a folder, if it is not there.

    Raises:
        OnnxgradError: it can't be made; the message names the option that asked for it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OnnxgradError(f"{option}: '{folder}' can't be made: {error.strerror}") from None


@contextmanager
def told(out: Path) -> Iterator[None]:
    """Say an operating system's error in the user's terms."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        what = "no space is left" if full else str(error.strerror)
        hint = "free some space, or choose another place with -o" if full else "choose another place with -o"
        raise OnnxgradError(f"'{out}' can't be written: {what}", hint) from error
