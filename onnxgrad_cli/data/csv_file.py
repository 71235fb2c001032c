"""Read data from a .csv file (or .tsv, with tabs) whose first line names the columns.

The module `columns` assigns columns to inputs. The column of an integer input may hold class names instead of integers,
if no cell is a number. Cells are parsed a few thousand lines at a time, so that only the numbers must fit in memory,
not the text.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO

import numpy as np

from onnxgrad_cli.data.class_names import FOR_NUMBERS, are_names, is_number, numbers_in
from onnxgrad_cli.data.columns import Chosen, KnownColumns, choose, shaped
from onnxgrad_cli.data.input_types import InputTypes
from onnxgrad_cli.data.loaded_columns import LoadedColumns
from onnxgrad_cli.data.read_failures import reading
from onnxgrad_cli.errors import UsageError, wrong_shape, wrong_type, wrong_value
from onnxgrad_cli.ir.types import is_float

LINES = 4096
"""The number of lines that are parsed at once."""

CORRECT = "correct the cell, or name the columns of each input: NAME, or NAME_0, NAME_1, ..."
"""The hint for a cell that is not a number."""

MAX_LINE_LENGTH = 2**26
"""The largest number of characters in a line. A file with longer lines is not a table, and is not read any further."""

Row = tuple[int, list[str]]
"""A row of a table: the number of its last line in the file, and its cells."""


def read(path: Path, inputs: InputTypes, known: KnownColumns) -> LoadedColumns:
    """Read the columns of a text table that belong to inputs and labels.

    Args:
        path: the file.
        inputs: the inputs and labels, with their types.
        known: the labels that are not read, and the order of columns in the training data.

    Raises:
        UsageError: the file can't be read, a row has too few or too many fields, or a cell is not a number.
    """
    with rows_of(path) as (header, rows):
        _check_cut(path, header, inputs)
        choice = choose(path, header, inputs, known)
        parse = _Parser(path, header, choice.chosen, inputs)
        blocks = [parse(block) for block in iter(lambda: list(islice(rows, LINES)), [])] or [parse([])]
    for feed in choice.chosen:
        parse.check_alike(feed, [block[feed] for block in blocks])
    arrays = {feed: shaped(np.concatenate([block[feed] for block in blocks]), inputs, feed) for feed in choice.chosen}
    others = [name or "the unnamed column" for name in choice.others]
    return LoadedColumns(arrays, others, order=choice.order)


@contextmanager
def rows_of(path: Path) -> Iterator[tuple[list[str], Iterator[Row]]]:
    """Open a text table, and return the names of its columns, and its non-empty rows.

    Raises:
        UsageError: the file can't be read.
    """
    hint = "save it as UTF-8, with quotes around fields that contain commas"
    with (
        reading(path, "a text table", hint, csv.Error, ValueError),
        path.open(newline="", encoding="utf-8-sig") as file,
    ):
        reader = csv.reader(_lines(file), delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
        yield [name.strip() for name in next(reader, [])], ((reader.line_num, row) for row in reader if row)


def _check_cut(path: Path, header: Sequence[str], inputs: InputTypes) -> None:
    """Raise an error if a table uses another separator than its suffix implies.

    Raises:
        UsageError: the header is a single unknown column that contains a separator.
    """
    if len(header) == 1 and header[0] not in inputs and any(mark in header[0] for mark in ",;|\t"):
        hint = "separate columns by commas in a .csv file, by tabs in a .tsv file; use decimal points in numbers"
        raise wrong_value(f"'{path}' has only one column in its first line: {header[0]}", hint)


def _lines(file: IO[str]) -> Iterator[str]:
    while line := file.readline(MAX_LINE_LENGTH):
        if len(line) == MAX_LINE_LENGTH:
            raise ValueError(f"a line has more than {MAX_LINE_LENGTH:,} characters")
        if "\0" in line:  # numpy drops a NUL at the end of a cell
            raise ValueError("it contains a NUL character, so it is not text")
        yield line


class _Parser:
    """Convert rows of text to a map: input -> array (rows, columns)."""

    def __init__(self, path: Path, header: Sequence[str], chosen: Chosen, inputs: InputTypes) -> None:
        self.path, self.header = path, header
        places = {name: at for at, name in enumerate(header)}
        self.places = {feed: [places[name] for name in names] for feed, names in chosen.items()}
        self.types = {feed: np.dtype(np.float64 if is_float(inputs[feed]) else np.int64) for feed in chosen}

    def __call__(self, rows: Sequence[Row]) -> dict[str, np.ndarray]:
        for line, row in rows:
            if len(row) != len(self.header):
                message = f"'{self.path}', line {line} has {len(row)} fields, but the first line has {len(self.header)}"
                raise wrong_shape(message, "put quotes around fields that contain commas")
        return {feed: self._parse(feed, rows) for feed in self.places}

    def _parse(self, feed: str, rows: Sequence[Row]) -> np.ndarray:
        places, dtype = self.places[feed], self.types[feed]
        cells = np.array([[row[at] for at in places] for _, row in rows], str).reshape(len(rows), len(places))
        try:
            return numbers_in(cells, dtype)
        except (ValueError, OverflowError):
            if dtype.kind == "i" and len(places) == 1 and are_names(cells.ravel().tolist()):
                return np.char.strip(cells).astype(object)
            raise self._bad_cell(feed, rows) from None

    def check_alike(self, feed: str, blocks: Sequence[np.ndarray]) -> None:
        """Check that the blocks of a column are all class names or all numbers.

        Raises:
            UsageError: some blocks have names and others numbers.
        """
        if len({block.dtype.kind for block in blocks}) > 1:
            name = next(block[0, 0] for block in blocks if block.dtype.kind == "O")
            place = f"'{self.path}', column '{self.header[self.places[feed][0]]}' for '{feed}'"
            message = f"{place}: some lines have names, such as '{name}', others numbers"
            raise wrong_type(message, "write class names in every line, or class numbers in every line")

    def _bad_cell(self, feed: str, rows: Sequence[Row]) -> UsageError:
        dtype = self.types[feed]
        cells = ((line, at, row[at]) for line, row in rows for at in self.places[feed])
        line, at, cell = next(found for found in cells if not is_number(found[2], dtype))
        what = f"'{cell}' is not a {'whole ' * (dtype.kind == 'i')}number" if cell.strip() else "the cell is empty"
        if dtype.kind == "i" and cell.strip() and any(is_number(row[at], dtype) for _, row in rows):
            what += ", but other lines have whole numbers: write class names in every line, or in none"
        named = len(self.places[feed]) == 1 and are_names(row[at] for _, row in rows)
        hint = FOR_NUMBERS if named else CORRECT
        return wrong_type(f"'{self.path}', line {line}, column '{self.header[at]}' for '{feed}': {what}", hint)
