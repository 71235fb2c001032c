"""Data in a Parquet file, by pyarrow; `columns` says which of its columns are which input.

Only the columns that are wanted are read, and these into memory. A column may hold lists, all of one length; or of
different lengths, where an input takes them: `sequences` pads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.training.data.columns import choose, shaped
from onnxgrad_cli.training.data.input_types import InputTypes
from onnxgrad_cli.training.data.lists import Lists
from onnxgrad_cli.training.data.reading import Found, library, reading


def read(path: Path, inputs: InputTypes) -> Found:
    """The columns of a Parquet file.

    Raises:
        UsageError: it can't be read, pyarrow is missing, a value is missing, or lists inside lists differ in length.
    """
    files = library("pyarrow.parquet", "parquet", path)
    with reading(path, "a Parquet file", "write it again"):
        file = files.ParquetFile(path)
        chosen, others = choose(path, file.schema_arrow.names, inputs)
        table = file.read(columns=[name for names in chosen.values() for name in names])
        arrays: dict[str, np.ndarray | Lists] = {}
        for feed, names in chosen.items():
            columns = [table.column(name).combine_chunks() for name in names]
            found = _column(path, feed, columns[0]) if len(names) == 1 else _side_by_side(path, names, columns)
            arrays[feed] = shaped(found, inputs, feed)
    return Found(arrays, others)


def _side_by_side(path: Path, names: Sequence[str], columns: Sequence[Any]) -> np.ndarray:
    """Columns of one number a row as one array (N, columns)."""
    return np.stack([_array(path, name, column) for name, column in zip(names, columns, strict=True)], 1)


def _column(path: Path, name: str, column: Any) -> np.ndarray | Lists:
    """A column as an array, its lists as further axes; or as `Lists`, if they are of different lengths."""
    if not column.null_count and hasattr(column, "value_lengths") and not hasattr(column, "keys"):
        lengths = column.value_lengths().to_numpy(zero_copy_only=False)
        if len(lengths) and lengths.min() < lengths.max():
            inner = _array(path, name, column.flatten())
            if inner.ndim == 1:
                return Lists.cut(inner, lengths)
    return _array(path, name, column)


def _array(path: Path, name: str, column: Any) -> np.ndarray:
    """A column as an array, its lists as further axes."""
    if column.null_count:
        row = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
        raise UsageError(
            f"'{path}', column '{name}': no value in row {row} (the first is 0)", "fill it or drop the row"
        )
    if not hasattr(column, "value_lengths") or hasattr(column, "keys"):  # a map has both
        if column.type.num_fields:
            raise UsageError(
                f"'{path}', column '{name}' holds {column.type}, which are no numbers",
                "save numbers, or lists of numbers that are as long for each sample",
            )
        return column.to_numpy(zero_copy_only=False)
    lengths = np.unique(column.value_lengths().to_numpy(zero_copy_only=False))
    if len(lengths) > 1:
        raise UsageError(
            f"'{path}', column '{name}': lists of {lengths[0]} to {lengths[-1]} elements", "pad them to one length"
        )
    inner = _array(path, name, column.flatten())
    return inner.reshape(len(column), int(lengths[0]) if len(lengths) else 0, *inner.shape[1:])
