"""Which columns of a table are which input: one rule for every format that has columns.

An input with one number a sample is the column of its name. One with more is the columns `name_0`, `name_1`, ... or
`name[0]`, `name[1]`, ..., or one column of lists; a single input that has none of these takes what is left, but for
the column without a name in which pandas writes the numbers of the rows. Of other data it takes the columns of the
same names, in the order in which they were: a file that has them in another order would be read as other numbers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, takewhile
from pathlib import Path

import numpy as np

from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.ir.types import in_words, is_float, shape_of
from onnxgrad_cli.training.data.input_types import InputTypes
from onnxgrad_cli.training.data.lists import Lists
from onnxgrad_cli.training.data.reading import Column

Chosen = Mapping[str, Sequence[str]]
"""Input -> its columns, in order."""


@dataclass(frozen=True)
class KnownColumns:
    """What is known of the columns of a table before it is read.

    Attributes:
        unread: those that are no input's, such as labels where none are wanted.
        order: input -> the columns that it took of other data, in order.
    """

    unread: Collection[str] = ()
    order: Chosen = field(default_factory=dict)


@dataclass(frozen=True)
class Choice:
    """The columns of each input.

    Attributes:
        chosen: them.
        others: the columns that are none's.
        order: input -> its columns, of one that took several whose names do not tell their order.
    """

    chosen: Chosen
    others: list[str]
    order: Chosen


def choose(path: Path, names: Sequence[str], inputs: InputTypes, known: KnownColumns) -> Choice:
    """The columns of each input, and those that are none's.

    Args:
        path: the file, for messages.
        names: its columns.
        inputs: the inputs; one that has no columns is left out.
        known: what is known of the columns.

    Raises:
        UsageError: two columns have one name, or an input has fewer or more columns than it takes, or others than it
            took of other data.
    """
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise UsageError(f"'{path}' has two columns '{twice}'", "give each column its own name")
    chosen = {feed: found for feed in inputs if (found := _named(feed, names, inputs))}
    wide = [feed for feed in inputs if feed not in chosen and width(inputs, feed) != 1]
    left = [name for name in _left(names, chosen) if name and name not in known.unread]
    left = [name for name in left if not name.startswith("__index_level_")]  # of pandas
    order: dict[str, Sequence[str]] = {}
    if len(wide) == 1 and left:
        (feed,) = wide
        chosen[feed] = _as_before(path, feed, left, known.order)
        order = {feed: chosen[feed]} if len(chosen[feed]) > 1 else {}
    for feed, found in chosen.items():
        missing = [
            *(name for name in inputs if name not in chosen),
            *(name for name in known.unread if name not in names),
        ]
        _check_width(path, feed, found, inputs, missing)
    return Choice(chosen, _left(names, chosen), order)


def _as_before(path: Path, feed: str, left: list[str], order: Chosen) -> list[str]:
    """What an input takes of the columns that are left: all of them, or those that it took of other data."""
    wanted, there = list(order.get(feed, left)), set(left)
    absent = next((name for name in wanted if name not in there), None)
    if absent is not None:
        raise UsageError(
            f"'{path}' has no column '{absent}', which '{feed}' took of the data that the model was trained on: "
            f"{_listed(wanted)}",
            f"name its columns so, or call them {feed}_0, {feed}_1, ... in this order",
        )
    return wanted


def _check_width(path: Path, feed: str, found: Sequence[str], inputs: InputTypes, others: Sequence[str]) -> None:
    """Make sure that an input gets as many columns as it takes; a column of its own name may hold lists.

    `others` are the inputs and labels that no column is called as: one of these may be among them.
    """
    wanted = width(inputs, feed)
    if wanted not in (None, len(found)) and list(found) != [feed]:
        raise UsageError(
            f"'{path}': '{feed}' is {in_words(inputs[feed])} and takes {wanted} columns, there "
            f"{'is' if len(found) == 1 else 'are'} {len(found)}: {_listed(found)}",
            _advice(feed, wanted, others),
        )


def _advice(feed: str, wanted: int | None, others: Sequence[str]) -> str | None:
    """What to do about an input that gets columns too many or too few."""
    if not wanted:
        return None
    named = f"call them {feed}_0 to {feed}_{wanted - 1}"
    return f"{named}; `columns` says which one is '{others[0]}', as COLUMN={others[0]}" if others else named


def width(inputs: InputTypes, feed: str) -> int | None:
    """How many numbers a sample of an input has; None where that is not known."""
    sizes = _sizes(inputs, feed)
    return None if sizes is None else math.prod(sizes)


def shaped(array: np.ndarray | Lists, inputs: InputTypes, feed: str) -> np.ndarray | Lists:
    """The numbers of each sample, (N, ...), in the shape that the input has, if they are as many."""
    sizes = _sizes(inputs, feed)
    if isinstance(array, Lists) or sizes is None or math.prod(sizes) != math.prod(array.shape[1:]):
        return array
    return array.reshape(len(array), *sizes)


def single(array: Column, inputs: InputTypes, feed: str) -> Column:
    """One float a sample, (N,), as (N, 1) for an input of floats that has that shape, as tables give it.

    Whole numbers in an array may be those of classes: of these nothing is guessed.
    """
    alone = isinstance(array, np.ndarray) and array.ndim == 1 and array.dtype.kind == "f"
    one = alone and is_float(inputs[feed]) and _sizes(inputs, feed) == [1]
    return array.reshape(-1, 1) if one and isinstance(array, np.ndarray) else array


def _sizes(inputs: InputTypes, feed: str) -> list[int] | None:
    shape = shape_of(inputs[feed])
    sizes = [size for size in (shape or ())[1:] if isinstance(size, int)]
    return sizes if shape is not None and len(sizes) == max(len(shape) - 1, 0) else None


def _named(feed: str, names: Sequence[str], inputs: InputTypes) -> list[str]:
    if feed in names:
        return [feed]
    others = set(names) - set(inputs)
    for form in (f"{feed}_{{}}", f"{feed}[{{}}]"):
        found = list(takewhile(others.__contains__, map(form.format, count())))
        if found:
            return found
    return []


def _left(names: Sequence[str], chosen: Chosen) -> list[str]:
    taken = {name for columns in chosen.values() for name in columns}
    return [name for name in names if name not in taken]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
