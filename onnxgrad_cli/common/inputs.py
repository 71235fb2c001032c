"""Prevent a job from overwriting its own input files, even through another path to the same file.

Code that receives paths of input files registers them at once. Code that writes a file first checks that the file is
not registered.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from onnxgrad_cli.errors import conflict

_KEPT: ContextVar[tuple[Path, ...] | None] = ContextVar("kept", default=None)
"""The files and folders registered so far; None outside of jobs."""


ALONE = frozenset(".csv .html .jsonl .md .npz .onnx .ort .parquet .safetensors .toml .tsv".split())
"""Suffixes of files that are never part of an input folder, such as a folder of pictures or a tokenizer.

Outputs with these suffixes may be written into an input folder.
"""


@contextmanager
def input_protection() -> Iterator[None]:
    """In the block, protect registered inputs from being overwritten.

    Inputs that are registered in the block are forgotten after it.
    """
    token = _KEPT.set(_KEPT.get() or ())
    try:
        yield
    finally:
        _KEPT.reset(token)


def protect_inputs(*inputs: object) -> None:
    """Register inputs: files, and folders with all their files. Other values, such as arrays, are ignored."""
    kept = _KEPT.get()
    if kept is not None:
        _KEPT.set((*kept, *(Path(each) for each in inputs if isinstance(each, (str, os.PathLike)))))


def check_is_no_input(out: Path, more: Iterable[Path] = ()) -> None:
    """Check that a file to be written is not an input, nor a link or another path to one.

    Args:
        out: the file to write.
        more: further input files.

    Raises:
        UsageError: the file is an input.
    """
    for file in (*(_KEPT.get() or ()), *more):
        if out.exists() and file.exists() and out.samefile(file):
            raise conflict(f"'{out}' is an input, which is never overwritten", "name another file")


def is_in_input(out: Path) -> bool:
    """Return True if a file to be written lies in an input folder and could be taken for a part of it."""
    place = Path(os.path.realpath(out))
    return out.suffix.lower() not in ALONE and any(
        folder.is_dir() and place.is_relative_to(os.path.realpath(folder)) for folder in _KEPT.get() or ()
    )
