"""From files to files: what each command does, as one call that neither prints nor exits."""

from __future__ import annotations

from pathlib import Path

from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.files import STREAM


def target_of(source: Path | None, out: str | Path | None, word: str) -> Path | None:
    """Where a model goes: as asked, else beside the one it was made from, as `<model>.<word>.onnx`; None is stdout."""
    if out is None:
        return source.with_name(f"{source.stem}.{word}.onnx") if source else None
    return None if str(out) == STREAM else Path(out)


def make_folder(folder: Path, option: str) -> None:
    """Make a folder, if it is not there.

    Raises:
        OnnxgradError: it can't be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OnnxgradError(f"{option}: '{folder}' can't be made: {error.strerror}") from None
