"""Data in a Parquet file, by pyarrow; `columns` says which of its columns are which input.

Only the columns that are wanted are read, and these into memory. A column may hold lists, all of one length; or of
different lengths, where an input takes them: `sequences` pads them. It may hold picture files too, as Hugging Face's
datasets have them: a field with their bytes, which become pictures as they are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad_cli.common.choices import Resize
from onnxgrad_cli.common.packages import load_package
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.ir.types import in_words
from onnxgrad_cli.training.data.columns import KnownColumns, choose, shaped
from onnxgrad_cli.training.data.input_types import InputTypes
from onnxgrad_cli.training.data.lists import Lists
from onnxgrad_cli.training.data.picture_layout import layout_of
from onnxgrad_cli.training.data.pictures import Pictures, check_size
from onnxgrad_cli.training.data.reading import Column, Found, reading


def read(path: Path, inputs: InputTypes, resize: Resize, known: KnownColumns) -> Found:
    """The columns of a Parquet file.

    Raises:
        UsageError: it can't be read, pyarrow is missing, a value is missing, or lists inside lists differ in length.
    """
    files = load_package("pyarrow.parquet", f"reading '{path}'")
    with reading(path, "a Parquet file", "write it again"):
        file = files.ParquetFile(path)
        return columns_of(path, file.schema_arrow.names, lambda names: file.read(columns=names), inputs, resize, known)


def columns_of(
    path: Path, names: Sequence[str], take: Callable[[list[str]], Any], inputs: InputTypes, resize: Resize,
    known: KnownColumns,
) -> Found:  # fmt: skip
    """The columns of a table of pyarrow that are inputs.

    Args:
        path: where it is from, for messages.
        names: its columns.
        take: gives a table of some of them.
        inputs: what is fed.
        resize: what becomes of pictures of other proportions.
        known: see `choose`.

    Raises:
        UsageError: a value is missing, or lists inside lists differ in length, or a picture can't be read.
    """
    choice = choose(path, names, inputs, known)
    table = take([name for each in choice.chosen.values() for name in each])
    table.validate(full=True)  # pyarrow believes offsets and indices else, wherever in the memory they lead
    arrays: dict[str, Column] = {}
    for feed, each in choice.chosen.items():
        columns = [table.column(name).combine_chunks() for name in each]
        if len(each) == 1 and _is_pictures(columns[0]):
            arrays[feed] = _pictures(path, feed, columns[0], inputs, resize)
        else:
            found = _column(path, feed, columns[0]) if len(each) == 1 else _side_by_side(path, each, columns)
            arrays[feed] = shaped(found, inputs, feed)
    return Found(arrays, choice.others, order=choice.order)


def _is_pictures(column: Any) -> bool:
    """Whether a column holds files: a field with their bytes, and one with their path."""
    kind = column.type
    return (
        kind.num_fields == 2
        and not hasattr(column, "keys")
        and {kind.field(i).name for i in (0, 1)} == {"bytes", "path"}
    )


class _Contents(Sequence[bytes]):
    """The bytes of files in a column, each taken out as it is needed."""

    def __init__(self, column: Any) -> None:
        self._column = column

    def __len__(self) -> int:
        return len(self._column)

    def __getitem__(self, row: Any) -> Any:
        return self._column[row].as_py()


def _pictures(path: Path, feed: str, column: Any, inputs: InputTypes, resize: Resize) -> Pictures:
    layout = check_size(feed, layout_of(inputs[feed]), in_words(inputs[feed]))
    contents = column.field("bytes")
    if column.null_count or contents.null_count:
        raise UsageError(
            f"'{path}', column '{feed}': a picture has no bytes", "save the pictures themselves, not their paths"
        )
    found = Pictures(path, _Contents(contents), layout, resize)
    found.check()
    return found


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
    if hasattr(column, "to_numpy_ndarray"):
        return _tensors(path, name, column)
    if not hasattr(column, "value_lengths") or hasattr(column, "keys"):  # a map has both
        if column.type.num_fields:
            raise UsageError(
                f"'{path}', column '{name}' holds {column.type}, which are no numbers",
                "save numbers, or lists of numbers that are as long for each sample",
            )
        found = column.dictionary_decode() if hasattr(column, "dictionary_decode") else column
        return found.to_numpy(zero_copy_only=False)
    lengths = np.unique(column.value_lengths().to_numpy(zero_copy_only=False))
    if len(lengths) > 1:
        raise UsageError(
            f"'{path}', column '{name}': lists of {lengths[0]} to {lengths[-1]} elements", "pad them to one length"
        )
    inner = _array(path, name, column.flatten())
    return inner.reshape(len(column), int(lengths[0]) if len(lengths) else 0, *inner.shape[1:])


def _tensors(path: Path, name: str, column: Any) -> np.ndarray:
    """Tensors of one shape as an array; pyarrow's own way to it takes a missing number for some number."""
    kind, numbers = column.type, _array(path, name, column.storage)
    axes = kind.permutation or range(len(kind.shape))
    return numbers.reshape(len(column), *kind.shape).transpose(0, *(axis + 1 for axis in axes))
