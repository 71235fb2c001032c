"""Data in a .csv file (or .tsv, with tabs) whose first line names the columns; `columns` says which input they are.

A column of one whole number may hold text instead, none of which is a number: names of classes, see `class_names`.
Cells are parsed a few thousand lines at a time, so that the text is never held whole; the numbers must fit in memory.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import IO

import numpy as np

from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.ir.types import is_float
from onnxgrad_cli.training.data.cells import are_names, is_number, numbers_in
from onnxgrad_cli.training.data.class_names import FOR_NUMBERS
from onnxgrad_cli.training.data.columns import Chosen, KnownColumns, choose, shaped
from onnxgrad_cli.training.data.input_types import InputTypes
from onnxgrad_cli.training.data.reading import Found, reading

LINES = 4096
"""How many lines are parsed at once."""

CORRECT = "correct the cell, or name the columns of each input: NAME, or NAME_0, NAME_1, ..."
"""What to do about a cell that is no number."""

LONGEST = 2**26
"""Characters of a line: what is longer is no table, and would be read whole before it could be told."""

BROKEN = (csv.Error, ValueError)
"""What is raised of a file that is no table in text."""

Rows = list[tuple[int, list[str]]]
"""The line on which each row ends, and its cells."""


def read(path: Path, inputs: InputTypes, known: KnownColumns) -> Found:
    """The columns of a table in text.

    Raises:
        UsageError: it can't be read, a row has too few or too many fields, or a cell is no number.
    """
    with (
        reading(path, "a table in text", "save it as UTF-8, with quotes around what holds commas", *BROKEN),
        path.open(newline="", encoding="utf-8-sig") as file,
    ):
        reader = csv.reader(_lines(file), delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
        header = [name.strip() for name in next(reader, [])]
        _check_cut(path, header, inputs)
        choice = choose(path, header, inputs, known)
        parse = _Parser(path, header, choice.chosen, inputs)
        blocks = [parse(block) for block in _blocks((reader.line_num, row) for row in reader if row)] or [parse([])]
    for feed in choice.chosen:
        parse.check_alike(feed, [block[feed] for block in blocks])
    arrays = {feed: np.concatenate([block[feed] for block in blocks]) for feed in choice.chosen}
    others = [name or "the column without a name" for name in choice.others]
    return Found({feed: shaped(array, inputs, feed) for feed, array in arrays.items()}, others, order=choice.order)


def _check_cut(path: Path, header: Sequence[str], inputs: InputTypes) -> None:
    """Refuse a table whose columns other marks than those of its format cut apart."""
    if len(header) == 1 and header[0] not in inputs and any(mark in header[0] for mark in ",;|\t"):
        raise UsageError(
            f"'{path}': its first line is one column: {header[0]}",
            "a .csv file has commas between its columns, and points in numbers; a .tsv file has tabs",
        )


def _lines(file: IO[str]) -> Iterator[str]:
    while line := file.readline(LONGEST):
        if len(line) == LONGEST:
            raise ValueError(f"a line has more than {LONGEST:,} characters")
        if "\0" in line:  # numpy drops it at the end of a cell
            raise ValueError("it holds a NUL, which no text does")
        yield line


def _blocks(rows: Iterable[tuple[int, list[str]]]) -> Iterator[Rows]:
    rows = iter(rows)
    while block := list(islice(rows, LINES)):
        yield block


class _Parser:
    """Turns rows into an array (rows, columns) for each input."""

    def __init__(self, path: Path, header: Sequence[str], chosen: Chosen, inputs: InputTypes) -> None:
        self.path, self.header = path, header
        places = {name: at for at, name in enumerate(header)}
        self.places = {feed: [places[name] for name in names] for feed, names in chosen.items()}
        self.types = {feed: np.dtype(np.float64 if is_float(inputs[feed]) else np.int64) for feed in chosen}

    def __call__(self, rows: Rows) -> dict[str, np.ndarray]:
        for line, row in rows:
            if len(row) != len(self.header):
                raise UsageError(
                    f"'{self.path}', line {line}: {len(row)} fields, the first line names {len(self.header)} columns",
                    "quote fields that hold commas",
                )
        return {feed: self._parse(feed, rows) for feed in self.places}

    def _parse(self, feed: str, rows: Rows) -> np.ndarray:
        places, dtype = self.places[feed], self.types[feed]
        cells = np.array([[row[at] for at in places] for _, row in rows], str).reshape(len(rows), len(places))
        try:
            return numbers_in(cells, dtype)
        except (ValueError, OverflowError):
            if dtype.kind == "i" and len(places) == 1 and are_names(cells.ravel().tolist()):
                return np.char.strip(cells).astype(object)
            raise self._bad_cell(feed, rows) from None

    def check_alike(self, feed: str, blocks: Sequence[np.ndarray]) -> None:
        """Refuse a column that holds names in some places, and numbers in others.

        Raises:
            UsageError: it does.
        """
        if len({block.dtype.kind for block in blocks}) > 1:
            name = next(block[0, 0] for block in blocks if block.dtype.kind == "O")
            at = self.header[self.places[feed][0]]
            raise UsageError(
                f"'{self.path}', column '{at}', which '{feed}' takes: it has names such as '{name}', and numbers",
                "write names of classes in every line, or their numbers",
            )

    def _bad_cell(self, feed: str, rows: Rows) -> UsageError:
        dtype = self.types[feed]
        cells = ((line, at, row[at]) for line, row in rows for at in self.places[feed])
        line, at, cell = next(found for found in cells if not is_number(found[2], dtype))
        what = f"'{cell}' is no {'whole ' * (dtype.kind == 'i')}number" if cell.strip() else "the cell is empty"
        if dtype.kind == "i" and cell.strip() and any(is_number(row[at], dtype) for _, row in rows):
            what += ", and others are: names of classes stand in every line, or in none"
        named = len(self.places[feed]) == 1 and are_names(row[at] for _, row in rows)
        return UsageError(
            f"'{self.path}', line {line}, column '{self.header[at]}', which '{feed}' takes: {what}",
            FOR_NUMBERS if named else CORRECT,
        )
