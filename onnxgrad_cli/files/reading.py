"""Read models from files, stdin, bytes or memory. Errors distinguish damaged models from files in other formats."""

from __future__ import annotations

import os
import re
import shlex
import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import ModelProto

from onnxgrad_cli.common import checks, strict_json
from onnxgrad_cli.common.inputs import protect_inputs
from onnxgrad_cli.errors import OnnxgradError, missing_file, missing_value, unreadable, wrong_type
from onnxgrad_cli.files.external_data import check_external_data, external_tensors, restate_references
from onnxgrad_cli.files.outputs import is_special
from onnxgrad_cli.files.validation import check_model
from onnxgrad_cli.ir.dialects import drop_absent_ends
from onnxgrad_cli.ir.modules import GENAI, GENAI_KIND
from onnxgrad_cli.ir.weightless_copy import copied

ModelSource = str | Path | bytes | ModelProto
"""The source of a model: the path of a file, the bytes of a file, or a model in memory."""

STREAM = "-"
"""The path that stands for stdin or stdout."""

HEAD = 4096
"""Number of bytes at the start of a file that are read to recognize its format."""

CHUNK = 2**24
"""Number of bytes to read at once from a source that is not a regular file."""

MAX_MODEL_BYTES = 2**31 - 1
"""Maximum size in bytes of a model without its external data. protobuf can't store longer messages."""

GENAI_CONFIG = "genai_config.json"
MOST_CONFIG = 2**20
"""Maximum size in bytes of the genai_config.json beside a model of onnxruntime-genai."""


def load_model(path: str | Path) -> tuple[ModelProto, Path | None]:
    """Read a model without its external data, and check that it is valid.

    Args:
        path: the file; '-' is stdin.

    Returns:
        The model, and the file that it was read from. Paths of external data are relative to the folder of this file.
        The file is None for stdin and for other pipes, such as a shell's <(...), because a pipe can be read only once.
        Then paths are relative to the working directory.

    Raises:
        UsageError: the path is empty.
        OnnxgradError: the file doesn't exist or is not a valid ONNX model; or external data are missing, too short, or
            outside the folder of the file.
    """
    if str(checks.path("model", path)) == STREAM:
        where, source, data = "stdin", None, _read_stdin()
    else:
        source = Path(path)
        protect_inputs(source)
        where, data = f"'{path}'", _read(source)
        source = None if is_read_once(source) else source
    model = _checked(_parse(data, where, Path(path).name), where, source)
    if model.producer_name == GENAI:
        _note_kind(model, source)
    return model, source


def is_read_once(model: ModelSource) -> bool:
    """Return True if a model is a pipe other than '-', so that it can be read only once."""
    return isinstance(model, (str, Path)) and is_special(Path(model))


def read_model(model: ModelSource, path: Path | None = None) -> tuple[ModelProto, Path | None]:
    """Read a model from any source. The caller must not change the result, because a ModelProto is not copied.

    Args:
        model: a file ('-' is stdin), the bytes of a model, or the model itself.
        path: the file that bytes or a ModelProto were read from.

    Returns:
        The model, and the file whose folder its external data are relative to; None for the working directory.

    Raises:
        UsageError: `model` has another type.
        OnnxgradError: the model is not valid (see `check_model`), or the file can't be read (see `load_model`).
    """
    if isinstance(model, ModelProto):
        check_model(model, "the model")
        return model, path
    if isinstance(model, (str, Path)):
        return load_model(model)
    if isinstance(model, (bytes, bytearray, memoryview)):
        return _checked(_parse(bytes(model), "the model"), "the model", path), path
    raise wrong_type(f"expected a path, a ModelProto or its bytes, got {type(model).__name__}")


def own_model(model: ModelSource, path: Path | None = None) -> tuple[ModelProto, Path | None]:
    """Read a model from any source. The caller may change the result, because a ModelProto is copied.

    See `read_model`.
    """
    found, source = read_model(model, path)
    if found is model:
        found = copied(found)
        drop_absent_ends(found)
        restate_references(external_tensors(found))
    return found, source


def _checked(model: ModelProto, where: str, source: Path | None) -> ModelProto:
    check_model(model, where)
    drop_absent_ends(model)
    restate_references(external_tensors(model))
    check_external_data(model, source)
    return model


_kept: tuple[BinaryIO | None, bytes] = (None, b"")
"""A pair: the stdin stream that was read, or None if none was read, and its content."""


def _read_stdin() -> bytes:
    """Read stdin, and keep the content: a job may read the same model again, but stdin can be read only once."""
    global _kept
    if sys.stdin.isatty():
        raise missing_value("a model is expected on stdin, but stdin is a terminal", "pipe a model in, or name a file")
    stream = sys.stdin.buffer
    if _kept[0] is not stream:
        _kept = stream, _read_stream(stream, "stdin")
    return _kept[1]


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            return _read_stream(stream, f"'{path}'")
    except FileNotFoundError:
        raise _missing(path) from None
    except IsADirectoryError:
        kind, hint = _kind_of(path)
        raise unreadable(f"'{path}' {kind}", hint) from None
    except OSError as error:
        raise unreadable(f"'{path}' can't be read: {error.strerror}", "check its permissions") from None


def _missing(path: Path) -> OnnxgradError:
    return missing_file(f"no such file: '{path}'", _neighbours(path))


def check_exists(model: ModelSource) -> None:
    """Raise an error if a model is a path without a file, before slow work begins.

    Raises:
        OnnxgradError: there is no such file.
    """
    if isinstance(model, (str, Path)) and str(model) != STREAM:
        with suppress(OSError, ValueError):  # such as a name that is too long: reading explains it
            if not Path(model).exists():
                raise _missing(Path(model))


def _kind_of(folder: Path) -> tuple[str, str | None]:
    """Return a description of the contents of a folder, and a hint on how to get a model from it."""
    if (folder / "saved_model.pb").is_file():
        return SAVED_MODEL[0], SAVED_MODEL[1].replace("FOLDER", shlex.quote(str(folder)))
    if folder.suffix == ".mlpackage":
        return CORE_ML
    # the folders of a training run and of adapters contain such files
    holds_weights = any(file.suffix == ".safetensors" for file in folder.iterdir())
    return "is a directory", _export(folder) if holds_weights else _neighbours(folder / "model.onnx")


def _export(weights: Path | str) -> str:
    return f"it contains weights, but no graph: `onnxgrad export {weights} --model MODEL` writes a model with them"


def _read_stream(stream: BinaryIO, where: str) -> bytes:
    """Read a stream. Stop as soon as it can't be a model, so that an endless stream is not read forever.

    Raises:
        OnnxgradError: the first bytes show another format, or the stream is longer than a model can be.
    """
    parts = [stream.read(HEAD)]
    _refuse_others(parts[0], where)
    found = os.fstat(stream.fileno())
    if stat.S_ISREG(found.st_mode) and found.st_size <= MAX_MODEL_BYTES:
        stream.seek(0)
        return stream.read()  # one read: joining chunks would take as long as reading them
    length = max(found.st_size, HEAD)
    while length <= MAX_MODEL_BYTES and (part := stream.read(CHUNK)):
        parts.append(part)
        length += len(part)
    if length > MAX_MODEL_BYTES:
        raise unreadable(
            f"{where} is larger than 2 GB, the maximum size of an ONNX model",
            "export the model with external data, which stores the weights in a file beside it",
        )
    return b"".join(parts)


def _neighbours(path: Path) -> str | None:
    """Return a hint for a missing file: models in its folder with similar names, or otherwise all models there."""
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
    """Raise an error if the first bytes of a file show that it is not an ONNX model."""
    if not head:
        raise unreadable(f"{where} is empty", "its export or copy was interrupted: do it again")
    for place, magic, what, hint in FORMATS:
        if head[place:].startswith(magic):
            raise unreadable(f"{where} {what}", hint)
    # the high bytes of the length of a safetensors header, and the first byte of that header
    if head[5:9] == b"\0\0\0{":
        raise unreadable(f"{where} is a safetensors file, not an ONNX model", _export("FILE"))
    if _is_text(head):
        hint = "models are binary; convert the text form with onnx.parser"
        raise unreadable(f"{where} is a text file, not an ONNX model", hint)
    # field numbers start at 1, and the fields of a model have wire type 0 or 2
    if head[0] < 1 << 3 or head[0] & 7 not in (0, 2):
        hint = "its copy was interrupted, or it has another format"
        raise unreadable(f"{where} does not begin like an ONNX model", hint)


def _parse(data: bytes, where: str, name: str = "") -> ModelProto:
    _refuse_others(data[:HEAD], where)
    model = ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError:
        _refuse_by_name(where, name)
        raise unreadable(
            f"{where} is not a complete ONNX model: its {len(data):,} bytes can't be decoded",
            "it is cut short or damaged; copy or export it again",
        ) from None
    if not model.HasField("graph") or not (model.graph.node or model.graph.output):
        _refuse_by_name(where, name)
        raise unreadable(f"{where} is not an ONNX model, or has no graph", "export it again")
    return model


TF2ONNX = "convert it: pip install tf2onnx && python -m tf2onnx.convert"

FORMATS = (
    (0, b"version https://git-lfs", "is a Git LFS pointer, not the model", "fetch it with 'git lfs pull'"),
    (0, b"PK\x03\x04", "is a zip archive, not an ONNX model",
     "export a PyTorch checkpoint with torch.onnx, a .keras file with model.export(FILE, format='onnx')"),
    (0, b"\x80", "is a Python pickle, not an ONNX model", "export a PyTorch checkpoint with torch.onnx"),
    (0, b"\x89HDF", "is an HDF5 file, such as Keras writes, not an ONNX model",
     f"{TF2ONNX} --keras FILE --output model.onnx"),
    (0, b"GGUF", "is a GGUF file of llama.cpp, not an ONNX model",
     "export the checkpoint that it was made from, with torch.onnx or the model builder of onnxruntime-genai"),
    (0, b"\x1f\x8b", "is compressed with gzip", "unpack it first: gunzip -c FILE | onnxgrad build - ..."),
    (0, b"ORTM", "is in onnxruntime's own format", "use the .onnx file it was made from"),
    (4, b"ORTM", "is in onnxruntime's own format", "use the .onnx file it was made from"),
    (4, b"TFL3", "is a TensorFlow Lite file, not an ONNX model", f"{TF2ONNX} --tflite FILE --output model.onnx"),
)  # fmt: skip
"""The formats that are recognized: (offset of the magic bytes, magic bytes, description, how to get an ONNX model)."""

CORE_ML = ("is a Core ML model, not an ONNX model", "export the model that it was made from")

SAVED_MODEL = ("is a TensorFlow SavedModel, not an ONNX model", f"{TF2ONNX} --saved-model FOLDER --output model.onnx")


def _refuse_by_name(where: str, name: str) -> None:
    """Raise an error that names the format of a file, if the file's name shows it."""
    found = SAVED_MODEL if name == "saved_model.pb" else CORE_ML if name.endswith(".mlmodel") else None
    if found:
        raise unreadable(f"{where} {found[0]}", found[1]) from None


def _is_text(head: bytes) -> bool:
    try:
        text = head.decode(errors="ignore" if len(head) == HEAD else "strict")
    except UnicodeDecodeError:
        return False
    return all(c.isprintable() or c in "\t\r\n" for c in text)


def _note_kind(model: ModelProto, path: Path | None) -> None:
    """Store the model type from the genai_config.json beside a model in its metadata.

    The metadata entry stays with the model if it is written to another folder.

    Args:
        model: a model, which is changed if it has no such entry and there is a genai_config.json beside it, as the
            model builder of onnxruntime-genai writes.
        path: the file that the model was read from.
    """
    if path is None or any(entry.key == GENAI_KIND for entry in model.metadata_props):
        return
    if kind := _kind(path.parent / GENAI_CONFIG):
        model.metadata_props.add(key=GENAI_KIND, value=kind)


def _kind(path: Path) -> str:
    """Return the model type in a genai_config.json, such as 'phi3'; "" if there is none."""
    try:
        if not path.is_file() or path.stat().st_size > MOST_CONFIG:
            return ""
        kind = strict_json.loads(path.read_bytes())["model"]["type"]
    # a broken config file is no reason to reject the model
    except (OSError, ValueError, RecursionError, LookupError, TypeError):
        return ""
    return kind if isinstance(kind, str) and re.fullmatch(r"[\w.-]{1,64}", kind) else ""
