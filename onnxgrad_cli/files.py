"""Models in and out of files: whatever is wrong with a file is said plainly, and nothing half-written stays.

Weights are never loaded: external data stay references; where they must travel, they are copied as a stream.
"""

from __future__ import annotations

import errno
import filecmp
import mmap
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper

from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.ir.dialects import complaint, mend
from onnxgrad_cli.ir.nodes import subgraphs
from onnxgrad_cli.ir.skeleton import copied, skeleton
from onnxgrad_cli.ir.types import SMALL, is_external, nbytes
from onnxgrad_cli.metadata import VERSION, tool_version

ModelSource = str | Path | bytes | ModelProto
"""Where a model may come from: a file, the bytes of one, or memory."""

STREAM = "-"
"""The name that stands for stdin and stdout."""

PROTOBUF_LIMIT = 2**31 - 2**26
"""Bytes of inline weights above which a model goes out with external data: protobuf ends at 2 GB."""

ALIGNMENT = 4096
"""Bytes. Tensors in a data file start at multiples of a page, so that a runtime can map them."""


# -- reading -------------------------------------------------------------------------------------------


def load_model(path: str | Path) -> tuple[ModelProto, Path | None]:
    """Read a model without its external data, and make sure that it is one.

    Args:
        path: the file; '-' is stdin.

    Returns:
        The model, and the file it came from: external data are relative to it. None for stdin, where they are
        relative to the working directory.

    Raises:
        OnnxgradError: there is no such file, it is no valid ONNX model, or its external data are missing, too
            short, or outside its folder.
    """
    if str(path) == STREAM:
        where, source, data = "stdin", None, _read_stdin()
    else:
        source = Path(path)
        where, data = f"'{path}'", _read(source)
    return _checked(_parse(data, where), where, source), source


def read_model(model: ModelSource, path: Path | None = None) -> tuple[ModelProto, Path | None]:
    """A model from wherever it is, not to be changed: a ModelProto is returned as it is.

    Args:
        model: a file ('-' is stdin), the bytes of one, or the model itself.
        path: where bytes or a model were read from.

    Returns:
        The model, and the file that its external data are relative to; None is the working directory.

    Raises:
        UsageError: it is of another type.
        OnnxgradError: a file or the bytes are no valid model; see `load_model`.
    """
    if isinstance(model, ModelProto):
        return model, path
    if isinstance(model, (str, Path)):
        return load_model(model)
    if isinstance(model, (bytes, bytearray, memoryview)):
        found = _checked(_parse(bytes(model), "the model"), "the model", path)
        return found, path
    raise UsageError(f"a path, a ModelProto or the bytes of one is wanted, not {type(model).__name__}")


def own_model(model: ModelSource, path: Path | None = None) -> tuple[ModelProto, Path | None]:
    """A model from wherever it is, to be changed: of a ModelProto a copy; see `read_model`."""
    found, source = read_model(model, path)
    return copied(found) if found is model else found, source


def _checked(model: ModelProto, where: str, source: Path | None) -> ModelProto:
    check_structure(model, where)
    check_external_data(model, source)
    return model


def _read_stdin() -> bytes:
    if sys.stdin.isatty():
        raise UsageError("a model is expected on stdin, which is a terminal", "pipe it in, or name a file")
    return sys.stdin.buffer.read()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise OnnxgradError(f"no such file: '{path}'", _neighbours(path)) from None
    except IsADirectoryError:
        raise OnnxgradError(f"'{path}' is a directory", _neighbours(path / "model.onnx")) from None
    except OSError as error:
        raise OnnxgradError(f"'{path}' can't be read: {error.strerror}", "check its permissions") from None


def _neighbours(path: Path) -> str | None:
    """A hint with the models that lie where `path` was looked for, the most alike first."""
    import difflib

    try:
        models = sorted(p.name for p in path.parent.iterdir() if p.suffix in (".onnx", ".ort", ".pb"))
    except OSError:
        return f"there is no folder '{path.parent}'"
    near = difflib.get_close_matches(path.name, models, n=3, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(str(path.parent / name) for name in near)}?"
    return f"models there: {', '.join(models[:5])}" if models else None


def _parse(data: bytes, where: str) -> ModelProto:
    if not data:
        raise OnnxgradError(f"{where} is empty", "its export or copy was interrupted")
    foreign = _what_else(data[:4096])
    if foreign:
        raise OnnxgradError(f"{where} {foreign[0]}", foreign[1])
    model = ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError:
        raise OnnxgradError(
            f"{where} is no complete ONNX model: it can't be decoded after {len(data):,} bytes",
            "it is cut short or damaged; copy or export it again",
        ) from None
    if not model.HasField("graph") or not model.graph.node:
        raise OnnxgradError(f"{where} is no ONNX model, or one without a graph", "export it again")
    return model


_MAGIC = (
    (b"version https://git-lfs", "is a Git LFS pointer, not the model", "fetch it with 'git lfs pull'"),
    (b"PK\x03\x04", "is a zip archive, no ONNX model", "export a PyTorch checkpoint with torch.onnx"),
    (b"\x1f\x8b", "is compressed with gzip", "unpack it first: gunzip -c FILE | onnxgrad build - ..."),
    (b"ORTM", "is in onnxruntime's own format", "use the .onnx file it was made from"),
)


def _what_else(head: bytes) -> tuple[str, str] | None:
    """What a file is that is no protobuf, and what to do about it."""
    for magic, what, hint in _MAGIC:
        if head.startswith(magic) or (magic == b"ORTM" and head[4:8] == magic):
            return what, hint
    try:
        text = head.decode(errors="ignore" if len(head) == 4096 else "strict")
    except UnicodeDecodeError:
        return None
    if all(c.isprintable() or c in "\t\r\n" for c in text):
        return "is a text file, not an ONNX model", "a model is binary; the text form is read by onnx.parser"
    return None


def check_structure(model: ModelProto, where: str = "the model") -> None:
    """Check a model by onnx.checker, without its weights; what onnxruntime reads all the same passes (`ir.dialects`).

    Raises:
        OnnxgradError: the model breaks the ONNX specification.
    """
    bare = skeleton(model)
    for tensor in tensors(bare):
        if is_external(tensor):  # in a node's attribute: the checker would look for the file
            tensor.ClearField("data_location")
            tensor.ClearField("external_data")
            tensor.dims[:] = [0]
    mend(bare)
    fault = complaint(bare)
    if fault:
        raise OnnxgradError(f"{where} is no valid ONNX model: {fault}", "export it again")


# -- external data -------------------------------------------------------------------------------------


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


# -- writing -------------------------------------------------------------------------------------------


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
