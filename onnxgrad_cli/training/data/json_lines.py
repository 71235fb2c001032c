"""Data in a .jsonl file: each line is an object, whose keys are columns; `columns` says which input they are.

A value is a number, the name of a class or a list, and lists may be of different lengths where an input takes them:
`sequences` pads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad_cli.common import strict_json
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.training.data.columns import KnownColumns, choose, shaped
from onnxgrad_cli.training.data.input_types import InputTypes
from onnxgrad_cli.training.data.lists import Lists
from onnxgrad_cli.training.data.reading import Found, reading

LONGEST = 2**26
"""Bytes of a line: what is longer is no table, and would be read whole before it could be told."""

BROKEN = (ValueError, RecursionError)
"""What is raised of a line that is no JSON: wrong, not in UTF-8, or nested without end."""


def objects(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The objects of a file, each with the number of its line.

    Raises:
        UsageError: the file can't be read, or a line is no object.
    """
    with reading(path, "JSON lines", "write an object on each line, in UTF-8", OSError), path.open("rb") as file:
        number = 0
        while line := file.readline(LONGEST):
            number += 1
            if line.strip():
                yield number, _object(path, number, line)


def _object(path: Path, number: int, line: bytes) -> Mapping[str, Any]:
    hint = "write an object on each line, in UTF-8, such as json.dumps makes"
    if len(line) == LONGEST:
        raise UsageError(f"'{path}', line {number} has more than {LONGEST:,} bytes", hint)
    try:
        found = strict_json.loads(line.decode("utf-8-sig"))
    except BROKEN as error:
        raise UsageError(f"'{path}', line {number} is no JSON: {error}", hint) from None
    if not isinstance(found, dict):
        raise UsageError(f"'{path}', line {number} is no object", hint)
    return found


def read(path: Path, inputs: InputTypes, known: KnownColumns) -> Found:
    """The columns of a file of JSON lines.

    Raises:
        UsageError: it can't be read, or a line has no value, or one that is no number and no list of numbers.
    """
    lines = objects(path)
    first = next(lines, None)
    if first is None:
        return Found({}, [])
    choice = choose(path, list(first[1]), inputs, known)
    wanted = [name for names in choice.chosen.values() for name in names]
    cells: dict[str, list[Any]] = {name: [] for name in wanted}
    numbers: list[int] = []
    for number, row in (first, *lines) if wanted else ():
        numbers.append(number)
        for name in wanted:
            if row.get(name) is None:
                raise UsageError(f"'{path}', line {number}: no value for '{name}'", "fill it or drop the line")
            cells[name].append(row[name])
    arrays: dict[str, np.ndarray | Lists] = {}
    for feed, names in choice.chosen.items():
        columns = [_column(path, name, numbers, cells.pop(name)) for name in names]
        arrays[feed] = columns[0] if len(columns) == 1 else _side_by_side(path, feed, columns)
        arrays[feed] = shaped(arrays[feed], inputs, feed)
    return Found(arrays, choice.others, order=choice.order)


def _side_by_side(path: Path, feed: str, columns: Sequence[np.ndarray | Lists]) -> np.ndarray:
    """Columns of one number a line as one array (N, columns)."""
    numbers = [column for column in columns if isinstance(column, np.ndarray) and column.ndim == 1]
    if len(numbers) < len(columns):
        raise UsageError(f"'{path}': '{feed}' is of several columns, and they hold lists", "name one for each input")
    return np.stack(numbers, 1)


def _column(path: Path, name: str, numbers: Sequence[int], cells: list[Any]) -> np.ndarray | Lists:
    """A column as an array, its lists as further axes; or as `Lists`, if they are of different lengths."""
    lists = [isinstance(cell, list) for cell in cells]
    if any(lists) and not all(lists):
        raise UsageError(
            f"'{path}', line {numbers[lists.index(not lists[0])]}: '{name}' is {_kind(not lists[0])}, and "
            f"{_kind(lists[0])} on the lines before",
            "save one of the two",
        )
    if all(isinstance(cell, str) for cell in cells):
        return np.array(cells, object)
    texts = [isinstance(cell, str) for cell in cells]
    if any(texts):
        what, other = ("a name", "no name") if not texts[0] else ("no name", "a name")
        raise UsageError(
            f"'{path}', line {numbers[texts.index(not texts[0])]}: '{name}' is {what}, and {other} on the lines before",
            "save one of the two",
        )
    found = _of_numbers(cells)
    if found is not None:
        return found
    wrong = next((at for at, cell in enumerate(cells) if _of_numbers([cell]) is None), None)
    where = f"'{path}'" if wrong is None else f"'{path}', line {numbers[wrong]}"
    what = "lists inside lists of different lengths" if wrong is None else "no number, and no list of numbers"
    raise UsageError(f"{where}: '{name}' is {what}", "save numbers of 64 bits, or lists of them")


def _kind(is_list: bool) -> str:
    return "a list" if is_list else "a number"


def _of_numbers(cells: list[Any]) -> np.ndarray | Lists | None:
    """Numbers, or lists of them, as an array, or as `Lists` where they are of different lengths; else None."""
    uneven = isinstance(cells[0], list) and len(set(map(len, cells))) > 1
    try:
        found = np.array([value for cell in cells for value in cell]) if uneven else np.array(cells)
    except (ValueError, RecursionError):  # uneven inside
        return None
    if found.dtype.kind not in "biuf" or (uneven and found.ndim > 1):
        return None
    return Lists.cut(found, np.array([len(cell) for cell in cells], np.int64)) if uneven else found
