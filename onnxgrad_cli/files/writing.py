"""Files are written whole or not at all, and only over what onnxgrad has written before."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

from onnx import ModelProto, TensorProto, numpy_helper

from onnxgrad_cli.common.inputs import check_is_no_input, is_in_input
from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.files.external_data import (
    check_data,
    is_inside,
    refer,
    references,
    relocated,
    tensors,
)
from onnxgrad_cli.files.outputs import check_is_file
from onnxgrad_cli.files.reading import HEAD, STREAM
from onnxgrad_cli.files.switch import ANOTHER, Switch, is_model, mentions, told
from onnxgrad_cli.ir.types import SMALL, is_external, nbytes
from onnxgrad_cli.metadata import VERSION, tool_version

PROTOBUF_LIMIT = 2**31 - 2**26
"""Bytes of inline weights above which a model goes out with external data: protobuf ends at 2 GB."""

ALIGNMENT = 4096
"""Bytes. Tensors in a data file start at multiples of a page, so that a runtime can map them."""


UNMARKED = frozenset({".csv", ".jsonl", ".parquet"})
"""Suffixes of forms in which nothing says who has written a file: whether onnxgrad has is not known."""

Check = Callable[[Path], object]
"""What looks at a file that was written and has not its name yet; an error from it leaves nothing written."""


def save_model(
    model: ModelProto,
    out: str | Path,
    source: Path | None = None,
    force: bool = False,
    copy_data: bool = True,
    check: Check | None = None,
) -> list[Path]:
    """Write a model, whole or not at all.

    External data stay references where `out` lies in the folder of `source`; else the data files are copied
    beside it. Inline weights too large for protobuf are moved to a file of their own, in `model` too. Both go by names
    that begin as that of `out` and say their content: `<out>.<12 digits>.data`.

    Args:
        out: the file; '-' is stdout, where external data stay references.
        source: the file the model was read from; it is never overwritten, nor are its data.
        force: replace files that onnxgrad did not write.
        copy_data: whether external data are copied to another folder.
        check: called with the file that was written, before it takes its name.

    Returns:
        The files written, the model first, then those that hold its data beside it.

    Raises:
        UsageError: `out` is an input, or a file that onnxgrad did not write.
        OnnxgradError: it can't be written, or another process writes it.
    """
    if str(out) == STREAM:
        mark(model)
        write_stdout(model.SerializeToString())
        return []
    out = Path(out)
    check_target(out, model, source, force)
    with Switch(out) as switch:
        files = stage_model(switch, model, out, source, copy_data, check)
        switch.commit()
    return files


def stage_model(
    switch: Switch,
    model: ModelProto,
    out: Path,
    source: Path | None = None,
    copy_data: bool = True,
    check: Check | None = None,
) -> list[Path]:
    """Write a model that takes its name with other files, over whatever is there; see `save_model`."""
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
    """Write a file, whole or not at all.

    Args:
        data: what is in it.
        out: the file.
        durable: see `Switch.stage`.

    Raises:
        OnnxgradError: it can't be written, or another process writes it.
    """
    with Switch(out) as switch:
        switch.stage(out, lambda file: file.write(data), durable)
        switch.commit()


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
        model, source: the model that is read: neither it nor its external data are ever overwritten, nor is what else
            is read (`common.inputs`).
        force: replace a file that onnxgrad did not write, or of which that is not known.

    Raises:
        UsageError: `out` is an input, a file that onnxgrad did not write, or a device or a pipe.
        OnnxgradError: it can't be written.
    """
    with told(out):  # a name may be too long
        there = out.exists()
    if there and source is not None:
        data = [source.parent / reference.location for reference in references(model)] if model else []
        check_is_no_input(out, (source, *dict.fromkeys(data)))
    check_is_no_input(out)
    check_is_file(out)
    if out.is_dir():
        raise OnnxgradError(f"'{out}' is a directory", f"name a file in it: {out / 'model.train.onnx'}")
    if not out.parent.is_dir():
        raise OnnxgradError(f"there is no folder '{out.parent}' to write '{out.name}' to", "make it first")
    if not os.access(out.parent, os.W_OK):
        raise OnnxgradError(f"'{out}' can't be written: {_why_not(out.parent)}", ANOTHER)
    if out.is_file() and not is_ours(out):
        if is_in_input(out):
            raise UsageError(f"'{out}' lies in a folder that is an input, which is never overwritten", "name another")
        if not force:
            whose = "" if out.suffix.lower() in UNMARKED else ", and onnxgrad did not write it"
            raise UsageError(f"'{out}' exists{whose}", "replace it with `force=True`")


def is_ours(path: Path) -> bool:
    """Whether onnxgrad wrote a file: a report says so in its head, or at its end; an adapter at its end.

    A model says so in its metadata, which stand near its end but for training information and functions.
    """
    if is_model(path):
        return mentions(path, VERSION.encode())
    with path.open("rb") as file:
        head = file.read(HEAD)
        file.seek(max(path.stat().st_size - HEAD, 0))
        return not head or b"onnxgrad" in head or b"onnxgrad" in file.read(HEAD)


def _copy_data(switch: Switch, external: Iterable[TensorProto], source: Path | None, folder: Path) -> dict[str, Path]:
    """Copy the data of a model's external tensors, if it is written where it could not refer to them.

    Returns:
        Location -> the copy.
    """
    origin, moved = source.parent if source else Path(), {}
    for location in check_data(external, source):
        data, there = origin / location, folder / location
        if not (is_inside(there, folder) and there.exists() and there.samefile(data)):
            moved[location] = switch.copy_data(data)
    return moved


def _move_weights(switch: Switch, stored: Iterable[TensorProto]) -> list[Path]:
    """Move the inline tensors of a model to a data file where they are too large for protobuf."""
    inline = [t for t in stored if not is_external(t) and t.data_type != TensorProto.STRING]
    if sum(nbytes(tensor) for tensor in inline) <= PROTOBUF_LIMIT:
        return []
    places: list[tuple[TensorProto, int, int]] = []

    def write(file: BinaryIO) -> None:
        for tensor in inline:
            if nbytes(tensor) > SMALL:
                offset = file.seek(-file.tell() % ALIGNMENT, os.SEEK_CUR)
                raw = tensor.raw_data or numpy_helper.from_array(numpy_helper.to_array(tensor)).raw_data
                places.append((tensor, offset, file.write(raw)))

    data = switch.write_data(write)
    for tensor, offset, length in places:
        for field in ("raw_data", "float_data", "double_data", "int32_data", "int64_data", "uint64_data"):
            tensor.ClearField(field)
        refer(tensor, data.name, offset, length)
    return [data]


def check_folder(folder: Path, option: str) -> None:
    """Make sure that files may be written to a folder, which need not be there, before any work is done for them.

    Raises:
        UsageError: it is a file, or would lie in one; the message names the option that asked for it.
        OnnxgradError: it can't be made or written to.
    """
    place = folder.absolute()
    there = next(each for each in (place, *place.parents) if each.exists())
    if not there.is_dir():
        raise UsageError(f"{option}: '{folder}' is no folder: '{there}' is a file", "name another folder")
    if not os.access(there, os.W_OK | os.X_OK):
        what = "written to" if there == place else "made"
        raise OnnxgradError(f"{option}: '{folder}' can't be {what}: {_why_not(there)}", "name another folder")


def _why_not(folder: Path) -> str:
    """Why nothing may be written in a folder."""
    only_read = hasattr(os, "statvfs") and os.statvfs(folder).f_flag & os.ST_RDONLY
    return "its file system is only read" if only_read else "permission denied"


def make_folder(folder: Path, option: str) -> None:
    """Make a folder, if it is not there.

    Raises:
        OnnxgradError: it can't be made; the message names the option that asked for it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OnnxgradError(f"{option}: '{folder}' can't be made: {error.strerror}") from None
