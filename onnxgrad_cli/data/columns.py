"""Assign the columns of a table to inputs. All formats that have columns follow the same rule.

An input with one number per sample takes the column with its name. An input with more numbers per sample takes the
columns `name_0`, `name_1`, ... or `name[0]`, `name[1]`, ..., or one column of lists. If only one input has none of
these columns, it takes all remaining columns, except for the unnamed column in which pandas writes row numbers. The
order of these columns in the training data is stored. Validation and test data must have the same columns, and they are
taken in that order, because in a different order the values would belong to other features.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, takewhile
from pathlib import Path

import numpy as np

from onnxgrad_cli.common.choices import Resize
from onnxgrad_cli.data.class_names import shortened
from onnxgrad_cli.data.input_types import InputTypes
from onnxgrad_cli.data.loaded_columns import Column
from onnxgrad_cli.errors import ambiguous, missing_value, wrong_shape, wrong_type
from onnxgrad_cli.ir.types import in_words, is_float, shape_of

Chosen = Mapping[str, Sequence[str]]
"""Input -> the names of its columns, in order."""


@dataclass(frozen=True)
class KnownColumns:
    """Facts about columns that are known before they are read.

    Attributes:
        unread: the names of columns that are not read, such as labels in prediction.
        order: input -> the columns that it took from the training data, in order.
        resize: how to resize pictures whose aspect ratio differs from the input's.
    """

    unread: Collection[str] = ()
    order: Chosen = field(default_factory=dict)
    resize: Resize = "crop"


@dataclass(frozen=True)
class Choice:
    """The assignment of columns to inputs.

    Attributes:
        chosen: input -> its columns.
        others: the columns that no input takes.
        order: input -> its columns, in order, only for an input that took several of the remaining columns. Their order
            must be stored, because it can't be derived from their names.
    """

    chosen: Chosen
    others: list[str]
    order: Chosen


def choose(path: Path, names: Sequence[str], inputs: InputTypes, known: KnownColumns) -> Choice:
    """Assign the columns of a table to inputs. Inputs without columns are left out.

    Args:
        path: the file, for messages.
        names: the names of the table's columns.
        inputs: the inputs and labels, with their types.
        known: the labels that are not read, and the order of columns in the training data.

    Raises:
        UsageError: two columns have the same name, an input gets too many or too few columns, or a column that an input
            took from the training data is missing.
    """
    for name, times in Counter(names).items():
        if times > 1:
            raise ambiguous(f"'{path}' has two columns '{name}'", "give each column its own name")
    chosen = {feed: found for feed in inputs if (found := _named(feed, names, inputs))}
    wide = [feed for feed in inputs if feed not in chosen and _width(inputs, feed) != 1]
    left = [name for name in _left(names, chosen) if name and name not in known.unread]
    left = [name for name in left if not name.startswith("__index_level_")]  # the row labels of pandas
    order: dict[str, Sequence[str]] = {}
    if len(wide) == 1 and left:
        (feed,) = wide
        chosen[feed] = _as_before(path, feed, left, known.order)
        order = {feed: chosen[feed]} if len(chosen[feed]) > 1 else {}
    missing = [name for name in inputs if name not in chosen] + [name for name in known.unread if name not in names]
    for feed, found in chosen.items():
        _check_width(path, feed, found, inputs, missing)
    return Choice(chosen, _left(names, chosen), order)


def side_by_side(path: Path, feed: str, columns: Sequence[Column]) -> Column:
    """Combine the columns of an input to an array (rows, columns). A single column is returned unchanged.

    Raises:
        UsageError: there are several columns, and one of them holds lists or names.
    """
    if len(columns) == 1:
        return columns[0]
    numbers = [
        each for each in columns if isinstance(each, np.ndarray) and each.ndim == 1 and each.dtype.kind in "biuf"
    ]
    if len(numbers) < len(columns):
        message = f"'{path}': '{feed}' has several columns, and not all of them hold one number per sample"
        raise wrong_type(message, f"save a single column of lists, '{feed}'")
    return np.stack(numbers, 1)


def _as_before(path: Path, feed: str, left: list[str], order: Chosen) -> list[str]:
    """Return the columns in `left` that an input takes: its columns in the training data, or all if these are unknown.

    Raises:
        UsageError: a column of the training data is missing.
    """
    wanted, there = list(order.get(feed, left)), set(left)
    for name in wanted:
        if name not in there:
            raise missing_value(
                f"'{path}' has no column '{name}'; in the training data, '{feed}' has the columns {shortened(wanted)}",
                f"give the columns these names, or name them {feed}_0, {feed}_1, ... in this order",
            )
    return wanted


def _check_width(path: Path, feed: str, found: Sequence[str], inputs: InputTypes, others: Sequence[str]) -> None:
    """Check that an input gets the number of columns that it needs.

    A single column with the input's name is accepted: it may hold lists.

    Args:
        path: the file, for messages.
        feed: the name of the input.
        found: the columns that were assigned to it.
        inputs: the inputs and labels, with their types.
        others: the inputs and labels that got no column. The hint suggests how to assign a column to the first of them.

    Raises:
        UsageError: the input gets too many or too few columns.
    """
    wanted = _width(inputs, feed)
    if wanted not in (None, len(found)) and list(found) != [feed]:
        advice = f"name them {feed}_0 to {feed}_{wanted - 1}" if wanted else None
        if advice and others:
            advice += f"; if one of them is '{others[0]}', pass COLUMN={others[0]} with `columns`"
        takes = f"'{feed}' is {in_words(inputs[feed])} and takes {wanted} columns"
        raise wrong_shape(f"'{path}': {takes}, but the data have {len(found)}: {shortened(found)}", advice)


def _width(inputs: InputTypes, feed: str) -> int | None:
    """Return the number of elements in a sample of an input, or None if it is unknown."""
    sizes = _sizes(inputs, feed)
    return None if sizes is None else math.prod(sizes)


def shaped(array: Column, inputs: InputTypes, feed: str) -> Column:
    """Reshape samples (N, ...) to the input's shape if the number of elements fits; otherwise return them unchanged."""
    sizes = _sizes(inputs, feed)
    if not isinstance(array, np.ndarray) or sizes is None or math.prod(sizes) != math.prod(array.shape[1:]):
        return array
    return array.reshape(len(array), *sizes)


def single(array: Column, inputs: InputTypes, feed: str) -> Column:
    """Reshape floats (N,), such as a column of a table, to (N, 1) if the input takes floats of shape (N, 1).

    Arrays of integers are unchanged, because the integers may be class numbers.
    """
    alone = isinstance(array, np.ndarray) and array.ndim == 1 and array.dtype.kind == "f"
    return shaped(array, inputs, feed) if alone and is_float(inputs[feed]) and _sizes(inputs, feed) == [1] else array


def _sizes(inputs: InputTypes, feed: str) -> list[int] | None:
    """Return the shape of a sample of an input, or None if it is not known."""
    shape = shape_of(inputs[feed])
    sizes = [size for size in (shape or ())[1:] if isinstance(size, int)]
    return None if shape is None or len(sizes) < len(shape) - 1 else sizes


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
