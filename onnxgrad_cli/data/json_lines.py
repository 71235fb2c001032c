"""Read data from a .jsonl file. Each line is a JSON object, whose keys are the names of columns.

The module `columns` assigns columns to inputs. A value is a number, a class name or a list of numbers. The modules
`sequences` and `ragged` combine lists of different lengths or shapes into batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad_cli.common import strict_json
from onnxgrad_cli.data.columns import KnownColumns, choose, shaped, side_by_side
from onnxgrad_cli.data.input_types import InputTypes
from onnxgrad_cli.data.lists import Lists
from onnxgrad_cli.data.loaded_columns import Column, LoadedColumns
from onnxgrad_cli.data.ragged import Ragged
from onnxgrad_cli.data.read_failures import reading
from onnxgrad_cli.errors import missing_value, wrong_type, wrong_value

MAX_LINE_BYTES = 2**26
"""The largest number of bytes in a line. A file with a longer line is refused, and is not read any further."""


def objects(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the objects of a file, each with the number of its line.

    Raises:
        UsageError: the file can't be read, or a line is not an object.
    """
    with reading(path, "JSON lines", "write a JSON object on each line, in UTF-8", OSError), path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES):
            number += 1
            if line.strip():
                yield number, _object(path, number, line)


def _object(path: Path, number: int, line: bytes) -> Mapping[str, Any]:
    hint = "write a JSON object on each line, in UTF-8, as json.dumps does"
    if len(line) == MAX_LINE_BYTES:
        raise wrong_value(f"'{path}', line {number} has more than {MAX_LINE_BYTES:,} bytes", hint)
    try:
        found = strict_json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested too deeply
        raise wrong_value(f"'{path}', line {number} is not JSON: {error}", hint) from None
    if not isinstance(found, dict):
        raise wrong_type(f"'{path}', line {number} is not an object", hint)
    return found


def read(path: Path, inputs: InputTypes, known: KnownColumns) -> LoadedColumns:
    """Read the columns of a JSON Lines file that belong to inputs and labels.

    Args:
        path: the file.
        inputs: the inputs and labels, with their types.
        known: the labels that are not read, and the order of columns in the training data.

    Raises:
        UsageError: the file can't be read, a value is missing, or a column is not all numbers, all class names or all
            lists.
    """
    lines = objects(path)
    first = next(lines, None)
    if first is None:
        return LoadedColumns({}, [])
    choice = choose(path, list(first[1]), inputs, known)
    wanted = [name for names in choice.chosen.values() for name in names]
    cells: dict[str, list[Any]] = {name: [] for name in wanted}
    numbers: list[int] = []
    for number, row in (first, *lines) if wanted else ():
        numbers.append(number)
        for name in wanted:
            if row.get(name) is None:
                hint = "fill in a value, or drop the line"
                raise missing_value(f"'{path}', line {number} has no value for '{name}'", hint)
            cells[name].append(row[name])
    arrays: dict[str, Column] = {}
    for feed, names in choice.chosen.items():
        columns = [_column(path, name, numbers, cells.pop(name)) for name in names]
        arrays[feed] = shaped(side_by_side(path, feed, columns), inputs, feed)
    return LoadedColumns(arrays, choice.others, order=choice.order)


def _column(path: Path, name: str, numbers: Sequence[int], cells: list[Any]) -> np.ndarray | Lists | Ragged:
    """Convert a column to an array in which lists become further axes.

    If the lists differ in length, convert it to `Lists`, or to `Ragged` for nested lists.

    Args:
        path: the file, for messages.
        name: the column.
        numbers: the line number of each cell.
        cells: the values of the column.

    Raises:
        UsageError: the cells are not all numbers, all names, or all lists of numbers.
    """
    for kind, words in ((list, ("a list", "a number")), (str, ("a name", "not a name"))):
        fits = [isinstance(cell, kind) for cell in cells]
        if any(fits) and not all(fits):
            line, (what, before) = numbers[fits.index(not fits[0])], words[::-1] if fits[0] else words
            message = f"'{path}', line {line}: '{name}' is {what}, but was {before} on the lines before"
            raise wrong_type(message, "save the same kind of value on all lines")
    if all(fits):
        return np.array(cells, object)
    found = _of_numbers(cells)
    if found is not None:
        return found
    wrong = next((at for at, cell in enumerate(cells) if _of_numbers([cell]) is None), None)
    where = f"'{path}'" if wrong is None else f"'{path}', line {numbers[wrong]}"
    what = "has lists of different depths" if wrong is None else "is neither a number nor a list of numbers"
    raise wrong_type(f"{where}: '{name}' {what}", "save numbers of 64 bits, or lists of them")


def _of_numbers(cells: list[Any]) -> np.ndarray | Lists | Ragged | None:
    """Convert numbers or lists of numbers to an array, or to `Lists` or `Ragged` if the lists differ in length.

    Return None if they can't be converted.
    """
    with suppress(ValueError, RecursionError):  # lists differ in length, or are nested too deeply
        found = np.array(cells)
        return found if found.dtype.kind in "biuf" else None
    try:
        arrays = [np.array(cell) for cell in cells]
    except (ValueError, RecursionError):
        return None
    if len({array.ndim for array in arrays}) > 1 or any(array.dtype.kind not in "biuf" for array in arrays):
        return None
    if arrays[0].ndim > 1:
        return Ragged.of_arrays(arrays)
    values = np.concatenate([array for array in arrays if array.size] or arrays)  # the dtype of an empty list is float
    return Lists.cut(values, np.array([len(array) for array in arrays], np.int64))
