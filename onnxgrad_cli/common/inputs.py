"""What a job reads it never writes, by whatever names a file is called where it is read and where it is written.

Whoever is given files to read says so as soon as it knows them, and whoever writes one asks.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from onnxgrad_cli.errors import UsageError

_KEPT: ContextVar[tuple[Path, ...] | None] = ContextVar("kept", default=None)
"""What is read by now; None outside of jobs."""


ALONE = frozenset(".csv .html .jsonl .md .npz .onnx .ort .parquet .safetensors .toml .tsv".split())
"""Suffixes of files that are read by their own names alone: none of a folder of data or a tokenizer is such."""


@contextmanager
def inputs_kept() -> Iterator[None]:
    """Keep what is read in the block, and what is read around it, from what is written in the block."""
    token = _KEPT.set(_KEPT.get() or ())
    try:
        yield
    finally:
        _KEPT.reset(token)


def keep(*inputs: object) -> None:
    """Say what is read: files, and folders of which all is; what names none, such as arrays, is passed over."""
    kept = _KEPT.get()
    if kept is not None:
        _KEPT.set((*kept, *(Path(each) for each in inputs if isinstance(each, (str, os.PathLike)))))


def check_is_no_input(out: Path, more: Iterable[Path] = ()) -> None:
    """Refuse to write a file that is read, of its own name, by a link, or as another name of it.

    Args:
        out: what is to be written.
        more: files that are read, besides those that were kept.

    Raises:
        UsageError: it is one of them.
    """
    for file in (*(_KEPT.get() or ()), *more):
        if out.exists() and file.exists() and out.samefile(file):
            raise UsageError(f"'{out}' is an input, which is never overwritten", "name another file")


def is_in_input(out: Path) -> bool:
    """Whether a file may be one of those in a folder that is read."""
    place = Path(os.path.realpath(out))
    return out.suffix.lower() not in ALONE and any(
        folder.is_dir() and place.is_relative_to(os.path.realpath(folder)) for folder in _KEPT.get() or ()
    )
