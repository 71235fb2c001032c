"""Numbers that are written as text: what they are, in every format, and what is the name of a class instead.

Text is a column of numbers where each cell is one, and of names where none is: a mistyped number is no name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np

WORDS = {"true": "1", "false": "0"}
WHOLE = re.compile(r"([+-]?\d+)\.0*")


def numbers_in(cells: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Cells of text as numbers. numpy takes 2024_01 as Python does, which in a table is no number.

    Raises:
        ValueError: one is none of this type.
        OverflowError: one is too large for it.
    """
    if (np.char.find(cells, "_") >= 0).any():
        raise ValueError("an underscore")
    try:
        return cells.astype(dtype)
    except ValueError:
        return np.vectorize(_plain, otypes=[object])(cells).astype(str).astype(dtype)


def _plain(cell: str) -> str:
    """A cell as numpy reads it: pandas writes True and False, and 1.0 where its whole numbers were read as floats."""
    word = cell.strip()
    whole = WHOLE.fullmatch(word)
    return whole[1] if whole else WORDS.get(word.lower(), word)


def is_number(cell: str, dtype: np.dtype) -> bool:
    """Whether a cell is a number of a type. NULs at its end are not: numpy drops them."""
    if "\0" in cell:
        return False
    try:
        numbers_in(np.array([cell]), dtype)
    except (ValueError, OverflowError):
        return False
    return True


def are_names(cells: Iterable[str]) -> bool:
    """Whether no cell is a number or empty, so that a mistyped number is not taken for the name of a class."""
    return all(cell and not is_number(cell, np.dtype(np.float64)) for cell in map(str.strip, cells))
