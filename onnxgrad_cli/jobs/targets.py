"""Where the model that a job makes is written."""

from __future__ import annotations

from pathlib import Path

from onnxgrad_cli.files import STREAM


def target_of(source: Path | None, out: str | Path | None, word: str) -> Path | None:
    """Where a model goes: as asked, else beside the one it was made from, as `<model>.<word>.onnx`; None is stdout."""
    if out is None:
        return source.with_name(f"{source.stem}.{word}.onnx") if source else None
    return None if str(out) == STREAM else Path(out)
