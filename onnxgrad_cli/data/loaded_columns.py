"""The type that the readers of all formats return: the samples of each input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from onnxgrad_cli.data.lists import Lists
from onnxgrad_cli.data.pictures import Pictures
from onnxgrad_cli.data.ragged import Ragged

Column = np.ndarray | Lists | Ragged | Pictures
"""The samples of an input: an array, lists that are padded in each batch, arrays of different shapes, or pictures that
are read for each batch."""


class LoadedColumns(NamedTuple):
    """The result of a reader.

    Attributes:
        arrays: input -> its samples, for the inputs that the data have.
        others: the names of the other arrays or columns in the data.
        names: input -> the names of its classes, if the data have them.
        order: input -> its columns in a table, in order, for inputs that took several columns with other names.
    """

    arrays: Mapping[str, Column]
    others: list[str]
    names: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    order: Mapping[str, Sequence[str]] = MappingProxyType({})
