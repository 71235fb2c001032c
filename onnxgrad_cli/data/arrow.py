"""Read data with pyarrow: a Parquet file, or a folder that Hugging Face's `Dataset.save_to_disk` has written.

The module `columns` assigns columns to inputs. Only these columns are read: from a Parquet file into memory; from a
folder they are memory-mapped. A column may hold lists. The modules `sequences` and `ragged` combine lists of different
lengths or shapes into batches. A column may also hold picture files, as in Hugging Face's datasets: structs whose field
`bytes` has the contents of a file. A picture is decoded when a batch needs it.

In a folder, state.json lists the Arrow files, and dataset_info.json lists the features. A feature of the type
ClassLabel has class names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad_cli.common import strict_json
from onnxgrad_cli.common.choices import Resize
from onnxgrad_cli.common.packages import load_package
from onnxgrad_cli.data.columns import KnownColumns, choose, shaped, side_by_side
from onnxgrad_cli.data.input_types import InputTypes
from onnxgrad_cli.data.lists import Lists
from onnxgrad_cli.data.loaded_columns import Column, LoadedColumns
from onnxgrad_cli.data.pictures import Pictures, check_size, layout_of
from onnxgrad_cli.data.ragged import Ragged, cut
from onnxgrad_cli.data.read_failures import check_regular, reading
from onnxgrad_cli.errors import ambiguous, missing_value, wrong_shape, wrong_type
from onnxgrad_cli.ir.types import in_words


def read_parquet(path: Path, inputs: InputTypes, known: KnownColumns) -> LoadedColumns:
    """Read the columns of a Parquet file that belong to inputs and labels.

    Raises:
        UsageError: the file can't be read, the package pyarrow is missing, a value is missing, or nested lists differ
            in length.
    """
    files = load_package("pyarrow.parquet", f"reading '{path}'")
    with reading(path, "a Parquet file", "write it again"):
        file = files.ParquetFile(path)
        return columns_of(path, file.schema_arrow.names, lambda names: file.read(columns=names), inputs, known)


def columns_of(
    path: Path, names: Sequence[str], take: Callable[[list[str]], Any], inputs: InputTypes, known: KnownColumns
) -> LoadedColumns:
    """Read the columns of a pyarrow table that belong to inputs and labels.

    Args:
        path: the source of the table, for messages.
        names: the names of the table's columns.
        take: a function that takes names of columns, and returns a pyarrow table with only these columns.
        inputs: the inputs and labels, with their types.
        known: the labels that are not read, the order of columns in the training data, and how to resize pictures.

    Raises:
        UsageError: a value is missing, nested lists differ in length, or a picture can't be read.
    """
    choice = choose(path, names, inputs, known)
    table = take([name for each in choice.chosen.values() for name in each])
    table.validate(full=True)  # otherwise pyarrow trusts offsets and indices, which may point to any memory
    arrays: dict[str, Column] = {}
    for feed, each in choice.chosen.items():
        columns = [table.column(name).combine_chunks() for name in each]
        if len(each) == 1 and _is_pictures(columns[0]):
            arrays[feed] = _pictures(path, feed, columns[0], inputs, known.resize)
        else:
            found = [_column(path, name, column) for name, column in zip(each, columns, strict=True)]
            arrays[feed] = shaped(side_by_side(path, feed, found), inputs, feed)
    return LoadedColumns(arrays, choice.others, order=choice.order)


def _is_pictures(column: Any) -> bool:
    """Return True if a column holds picture files: structs with the two fields `bytes` and `path`."""
    kind = column.type
    if kind.num_fields != 2 or hasattr(column, "keys"):
        return False
    return {kind.field(i).name for i in (0, 1)} == {"bytes", "path"}


class _Contents(Sequence[bytes]):
    """The contents of the picture files in a column. A file is read on access."""

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
        hint = "save the pictures themselves, not their paths"
        raise missing_value(f"'{path}', column '{feed}': a picture has no bytes", hint)
    found = Pictures(path, _Contents(contents), layout, resize)
    found.check()
    return found


def _column(path: Path, name: str, column: Any) -> np.ndarray | Lists | Ragged:
    """Convert a column to an array (rows, ...) with a further axis for each level of nested lists.

    If the lists differ in length, convert the column to `Lists`, or to `Ragged` for nested lists.
    """
    levels, inner = [], column
    while not inner.null_count and _is_lists(inner):
        levels.append(inner.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64))
        inner = inner.flatten()
    values = _array(path, name, inner, levels)
    if all(not len(lengths) or lengths.min() == lengths.max() for lengths in levels):
        sizes = [int(lengths.max(initial=0)) for lengths in levels]
        return values.reshape(len(column), *sizes, *values.shape[1:])
    if len(levels) == 1 and values.ndim == 1:
        return Lists.cut(values, levels[0])
    shapes = np.zeros((len(column), 0), np.int64)
    for lengths in levels:
        counts = shapes.prod(1)  # the number of lists of each sample at this level
        first = np.concatenate([lengths, [0]])[np.cumsum(counts) - counts]
        if (np.repeat(first, counts) != lengths).any():
            row = int(np.repeat(np.arange(len(column)), counts)[np.repeat(first, counts) != lengths][0])
            message = f"'{path}', column '{name}' has nested lists of different lengths in row {row} (the first is 0)"
            raise wrong_shape(message, "save an array for each sample, which has lists of the same length inside")
        shapes = np.concatenate([shapes, first[:, None]], 1)
    rest = np.tile(np.array(values.shape[1:], np.int64), (len(column), 1))
    return cut(values.reshape(-1), np.concatenate([shapes, rest], 1))


def _is_lists(column: Any) -> bool:
    """Return True if a column holds lists. Maps and tensors have some attributes of lists, but are not lists."""
    return hasattr(column, "value_lengths") and not hasattr(column, "keys") and not hasattr(column, "to_numpy_ndarray")


def _array(path: Path, name: str, column: Any, levels: Sequence[np.ndarray]) -> np.ndarray:
    """Convert the scalars or tensors in a column to an array (elements, ...).

    A missing number in a tensor is an error. pyarrow's own conversion would replace it by an arbitrary number.

    Args:
        path, name: the file and the column, for messages.
        column: the elements of all rows.
        levels: the lengths of the lists that the elements were in, from the outermost level to the innermost one.
    """
    if column.null_count:
        row = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
        for lengths in reversed(levels):
            row = int(np.searchsorted(np.cumsum(lengths), row, "right"))
        hint = "fill in a value, or drop the row"
        raise missing_value(f"'{path}', column '{name}' has no value in row {row} (the first is 0)", hint)
    kind = column.type
    if hasattr(column, "to_numpy_ndarray"):
        axes, sizes = kind.permutation or range(len(kind.shape)), np.full(len(column), np.prod(kind.shape))
        numbers = _array(path, name, column.storage.flatten(), [*levels, sizes])
        return numbers.reshape(len(column), *kind.shape).transpose(0, *(axis + 1 for axis in axes))
    if kind.num_fields:
        hint = "save numbers, or lists of numbers that have the same length for each sample"
        raise wrong_type(f"'{path}', column '{name}' holds {kind}, which are not numbers", hint)
    found = column.dictionary_decode() if hasattr(column, "dictionary_decode") else column
    return found.to_numpy(zero_copy_only=False)


STATE, INFO, SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
HINT = "write it with datasets.Dataset.save_to_disk(FOLDER)"
MAX_JSON_BYTES = 2**26
"""The largest allowed size of a JSON file in the folder, in bytes."""


def is_arrow_folder(path: Path) -> bool:
    """Return True if a folder is a Hugging Face Dataset or DatasetDict."""
    return (path / STATE).is_file() or (path / SPLITS).is_file()


def read_arrow_folder(path: Path, inputs: InputTypes, known: KnownColumns) -> LoadedColumns:
    """Read the columns of a Hugging Face Dataset that belong to inputs and labels, and the class names.

    Raises:
        UsageError: the folder can't be read, it holds several splits, or the package pyarrow is missing.
    """
    if (path / SPLITS).is_file() and not (path / STATE).is_file():
        splits = [str(name) for name in _described(path / SPLITS).get("splits") or []]
        hint = f"choose one: '{path / (splits or ['train'])[0]}'"
        raise ambiguous(f"'{path}' has several splits: {', '.join(splits)}", hint)
    state = _described(path / STATE)
    with reading(path, "a Hugging Face Dataset", HINT):
        if any(state.get(key) for key in ("_indices_data_files", "_indices_files")):
            raise ValueError("its rows are selected by a table of indices: call flatten_indices() before saving it")
        files = [_inside(path, each["filename"]) for each in state["_data_files"]]
    arrow, ipc = (load_package(name, f"reading '{path}'") for name in ("pyarrow", "pyarrow.ipc"))
    tables = []
    for file in files:
        check_regular(file)
        with reading(file, "an Arrow file", HINT):
            tables.append(ipc.open_stream(arrow.memory_map(str(file))).read_all())
    with reading(path, "a Hugging Face Dataset", HINT):
        table = arrow.concat_tables(tables)
        found = columns_of(path, table.schema.names, lambda names: table.select(names), inputs, known)
    return found._replace(names=_class_names(path, inputs))


def _class_names(path: Path, inputs: InputTypes) -> dict[str, tuple[str, ...]]:
    """Return the class names of the inputs whose column is a ClassLabel."""
    features = _described(path / INFO).get("features") if (path / INFO).is_file() else None
    found = {}
    for name, feature in (features if isinstance(features, dict) else {}).items():
        names = feature.get("names") if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" else None
        if name in inputs and isinstance(names, list) and all(isinstance(each, str) for each in names):
            found[name] = tuple(names)
    return found


def _described(file: Path) -> dict[str, Any]:
    check_regular(file)
    with reading(file, "JSON", HINT):
        if file.stat().st_size > MAX_JSON_BYTES:
            raise ValueError(f"it has more than {MAX_JSON_BYTES:,} bytes")
        found = strict_json.loads(file.read_text("utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it is not an object")
    return found


def _inside(path: Path, name: str) -> Path:
    """Return the path of a file in the folder `path`. The folder may be untrusted, so files elsewhere are refused.

    Raises:
        ValueError: the file is not directly in the folder.
    """
    file = path / name
    if Path(name).name != name or not file.resolve().is_relative_to(path.resolve()):
        raise ValueError(f"'{name}' is not a file in this folder")
    return file
