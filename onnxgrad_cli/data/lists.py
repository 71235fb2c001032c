"""Store lists of different lengths, such as the tokens of samples, as an array of all elements and their offsets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Lists:
    """A column of lists of scalars. The lists may differ in length.

    Attributes:
        values: the concatenated elements of all lists, (total,).
        offsets: the index in `values` at which each list begins, followed by the end of the last list, int64 (N + 1,).
    """

    values: np.ndarray
    offsets: np.ndarray

    @classmethod
    def cut(cls, values: np.ndarray, lengths: np.ndarray) -> Lists:
        """Cut an array into lists of the given lengths."""
        return cls(values, np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)]))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the elements."""
        return self.values.dtype

    @property
    def lengths(self) -> np.ndarray:
        """The length of each list, int64 (N,)."""
        return np.diff(self.offsets)

    @property
    def shape(self) -> tuple[int, int]:
        """The number of lists and the length of the longest list."""
        return len(self), int(self.lengths.max(initial=0))

    @property
    def ndim(self) -> int:
        """The number of axes, 2: samples and positions."""
        return 2

    @property
    def size(self) -> int:
        """The number of elements of all lists."""
        return self.values.size

    def longest(self, rows: np.ndarray) -> int:
        """Return the length of the longest list with an index in `rows`, or 0 if `rows` is empty."""
        return int((self.offsets[rows + 1] - self.offsets[rows]).max(initial=0))

    def take(self, rows: Iterable[int]) -> list[np.ndarray]:
        """Return the lists with the indices `rows`, each as an array (length,)."""
        return [self.values[self.offsets[row] : self.offsets[row + 1]] for row in rows]

    def cut_off(self, longest: int) -> Lists:
        """Truncate lists to their first `longest` elements."""
        return self if self.shape[1] <= longest else self.cut_at(np.full(len(self), longest, np.int64))

    def cut_at(self, lengths: np.ndarray) -> Lists:
        """Truncate each list to its length in `lengths`, int64 (N,). Shorter lists are unchanged."""
        before = self.lengths
        places = np.arange(len(self.values)) - np.repeat(self.offsets[:-1], before)
        return Lists.cut(self.values[places < np.repeat(lengths, before)], np.minimum(before, lengths))

    def only(self, rows: np.ndarray) -> Lists:
        """Return a column of the lists with the indices `rows`, int64 (n,), in this order."""
        lengths = self.lengths[rows]
        return Lists.cut(np.concatenate([self.values[:0], *self.take(rows)]), lengths)

    def blocks(self, elements: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield blocks of lists, for checking their elements: the index of the first list, and an array (n, longest).

        An array has about `elements` elements. Each list is a row, padded with its last element. An empty list becomes
        a row filled with the first element of the column. Nothing is yielded if all lists are empty.
        """
        rows = max(elements // max(self.shape[1], 1), 1)
        for start in range(0, len(self), rows):
            numbers = range(start, min(start + rows, len(self)))
            some = [row if len(row) else self.values[:1] for row in self.take(numbers)]
            if self.size:
                longest = max(map(len, some))
                yield start, np.stack([np.pad(row, (0, longest - len(row)), "edge") for row in some])


def padded(arrays: Sequence[np.ndarray], shape: Sequence[int], fill: int) -> np.ndarray:
    """Stack arrays into an array (n, *`shape`). Each axis of an array is padded at its end with `fill`."""
    found = np.full((len(arrays), *shape), fill, arrays[0].dtype if arrays else np.int64)
    for row, array in zip(found, arrays, strict=True):
        row[tuple(map(slice, array.shape))] = array
    return found
