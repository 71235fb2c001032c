"""Models from files, from stdin, from bytes: what is no model is told from what is a damaged one."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from google.protobuf.message import DecodeError, Message  # type: ignore[import-untyped]
from onnx import ModelProto

from onnxgrad_cli.common import checks
from onnxgrad_cli.common.inputs import keep
from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.files.contents import check_contents
from onnxgrad_cli.files.external_data import check_external_data, external_tensors, restate_references, tensors
from onnxgrad_cli.files.genai_config import note_kind
from onnxgrad_cli.files.switch import is_special
from onnxgrad_cli.ir.dialects import complaint, drop_absent_ends, mend
from onnxgrad_cli.ir.functions import check_growth
from onnxgrad_cli.ir.skeleton import copied, skeleton
from onnxgrad_cli.ir.types import is_external

ModelSource = str | Path | bytes | ModelProto
"""Where a model may come from: a file, the bytes of one, or memory."""

STREAM = "-"
"""The name that stands for stdin and stdout."""

HEAD = 4096
"""Bytes by which it is told what a file is."""

CHUNK = 2**24
"""Bytes that are read at once of what is no file."""

LARGEST = 2**31 - 1
"""Bytes of a model without its external data: protobuf has no longer messages."""


def load_model(path: str | Path) -> tuple[ModelProto, Path | None]:
    """Read a model without its external data, and make sure that it is one.

    Args:
        path: the file; '-' is stdin.

    Returns:
        The model, and the file it came from: external data are relative to it. None for stdin and for a pipe by any
        other name, such as a shell's <(...), which nobody reads again: there they are relative to the working
        directory.

    Raises:
        UsageError: the path is empty.
        OnnxgradError: there is no such file, it is no valid ONNX model, or its external data are missing, too
            short, or outside its folder.
    """
    if str(checks.path("model", path)) == STREAM:
        where, source, data = "stdin", None, _read_stdin()
    else:
        source = Path(path)
        keep(source)
        where, data = f"'{path}'", _read(source)
        source = None if is_read_once(source) else source
    model = _checked(_parse(data, where), where, source)
    note_kind(model, source)
    return model, source


def is_read_once(model: ModelSource) -> bool:
    """Whether a model comes through a pipe by another name than '-', so that it can't be read again."""
    return isinstance(model, (str, Path)) and is_special(Path(model))


def read_model(model: ModelSource, path: Path | None = None) -> tuple[ModelProto, Path | None]:
    """A model from wherever it is, not to be changed: of a ModelProto, returned as it is, the sizes are checked.

    Args:
        model: a file ('-' is stdin), the bytes of one, or the model itself.
        path: where bytes or a model were read from.

    Returns:
        The model, and the file that its external data are relative to; None is the working directory.

    Raises:
        UsageError: it is of another type.
        OnnxgradError: a file or the bytes are no valid model; see `load_model`. Or a ModelProto holds less than it
            declares.
    """
    if isinstance(model, ModelProto):
        with _text(model, "the model"):
            check_contents(model, "the model")
            check_growth(model.functions, model.graph.node)
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
    if found is model:
        found = copied(found)
        drop_absent_ends(found)
        restate_references(external_tensors(found))
    return found, source


def _checked(model: ModelProto, where: str, source: Path | None) -> ModelProto:
    with _text(model, where):
        check_contents(model, where)
        check_structure(model, where)
        check_growth(model.functions, model.graph.node)
        drop_absent_ends(model)
        restate_references(external_tensors(model))
        check_external_data(model, source)
    return model


@contextmanager
def _text(model: ModelProto, where: str) -> Iterator[None]:
    """Tell a name that is no text, which whoever meets it stumbles over."""
    try:
        yield
    except (TypeError, UnicodeDecodeError):  # protobuf gives out as bytes what it can't decode
        found = not_text(model)
        if not found:
            raise
        raise OnnxgradError(f"{where} is no valid ONNX model: {found}", "export it again") from None


def not_text(message: Message) -> str:
    """Which text in a message, as a name in a model, is not UTF-8; "" for none."""
    for field, value in message.ListFields():
        for each in value if field.is_repeated else (value,):
            if isinstance(each, Message):
                found = not_text(each)
                if found:
                    return found
            elif isinstance(each, bytes) and field.type == field.TYPE_STRING:
                return f"'{field.full_name}' is not UTF-8: {each[:100]!r}"
    return ""


_kept: tuple[BinaryIO | None, bytes] = (None, b"")
"""The stdin that was read, and what was in it."""


def _read_stdin() -> bytes:
    """What stdin holds, which can be read but once: it is kept for whoever judges the model again."""
    global _kept
    if sys.stdin.isatty():
        raise UsageError("a model is expected on stdin, which is a terminal", "pipe it in, or name a file")
    stream = sys.stdin.buffer
    if _kept[0] is not stream:
        _kept = stream, _read_stream(stream, "stdin")
    return _kept[1]


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            return _read_stream(stream, f"'{path}'")
    except FileNotFoundError:
        raise OnnxgradError(f"no such file: '{path}'", _neighbours(path)) from None
    except IsADirectoryError:
        hint = _export(path) if _holds_weights(path) else _neighbours(path / "model.onnx")
        raise OnnxgradError(f"'{path}' is a directory", hint) from None
    except OSError as error:
        raise OnnxgradError(f"'{path}' can't be read: {error.strerror}", "check its permissions") from None


def _holds_weights(folder: Path) -> bool:
    """Whether a folder is one of a training, or of adapters, whose weights want a model."""
    return any(file.suffix == ".safetensors" for file in folder.iterdir())


def _export(weights: Path | str) -> str:
    return f"it holds weights, and no graph: `onnxgrad export {weights} --model MODEL` writes a model with them"


def _read_stream(stream: BinaryIO, where: str) -> bytes:
    """What a stream holds: of one without an end, or of what is no model, no more than is needed to tell.

    Raises:
        OnnxgradError: it can't be a model, by its beginning or by its length.
    """
    parts = [stream.read(HEAD)]
    _refuse_others(parts[0], where)
    found = os.fstat(stream.fileno())
    if stat.S_ISREG(found.st_mode) and found.st_size <= LARGEST:
        stream.seek(0)
        return stream.read()  # at once: to join parts takes as long as to read them
    length = max(found.st_size, HEAD)
    while length <= LARGEST and (part := stream.read(CHUNK)):
        parts.append(part)
        length += len(part)
    if length > LARGEST:
        raise OnnxgradError(
            f"{where} is longer than 2 GB, which no ONNX model is",
            "a larger model keeps its weights in a file beside it: export it with external data",
        )
    return b"".join(parts)


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


def _refuse_others(head: bytes, where: str) -> None:
    """Refuse what is no model by its first bytes."""
    if not head:
        raise OnnxgradError(f"{where} is empty", "its export or copy was interrupted")
    foreign = _what_else(head)
    if foreign:
        raise OnnxgradError(f"{where} {foreign[0]}", foreign[1])


def _parse(data: bytes, where: str) -> ModelProto:
    _refuse_others(data[:HEAD], where)
    model = ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError:
        raise OnnxgradError(
            f"{where} is no complete ONNX model: it can't be decoded after {len(data):,} bytes",
            "it is cut short or damaged; copy or export it again",
        ) from None
    if not model.HasField("graph") or not (model.graph.node or model.graph.output):
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
    if head[5:9] == b"\0\0\0{":  # the length of its header, and that
        return "is a safetensors file, no ONNX model", _export("FILE")
    if _is_text(head):
        return "is a text file, not an ONNX model", "a model is binary; the text form is read by onnx.parser"
    if head[0] < 1 << 3 or head[0] & 7 not in (0, 2):  # a field has a number, and those of a model are of two kinds
        return "does not begin as an ONNX model does", "its copy was interrupted, or it is something else"
    return None


def _is_text(head: bytes) -> bool:
    try:
        text = head.decode(errors="ignore" if len(head) == HEAD else "strict")
    except UnicodeDecodeError:
        return False
    return all(c.isprintable() or c in "\t\r\n" for c in text)


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
