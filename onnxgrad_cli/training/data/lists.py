"""Samples that are lists of different lengths, as of tokens: one array of all elements, and where each list ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Lists:
    """A column of lists, which have one element a place.

    Attributes:
        values: the elements of all lists, one after the other, (total,).
        offsets: where each list begins in `values`, and where the last one ends, int64 (N + 1,).
    """

    values: np.ndarray
    offsets: np.ndarray

    @classmethod
    def cut(cls, values: np.ndarray, lengths: np.ndarray) -> Lists:
        """The elements `values` in lists of these lengths."""
        return cls(values, np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)]))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def dtype(self) -> np.dtype:
        """The type of the elements."""
        return self.values.dtype

    @property
    def lengths(self) -> np.ndarray:
        """How long each list is, int64 (N,)."""
        return np.diff(self.offsets)

    @property
    def shape(self) -> tuple[int, int]:
        """How many lists there are, and how long the longest is."""
        return len(self), int(self.lengths.max(initial=0))

    @property
    def ndim(self) -> int:
        """Two axes: samples and places."""
        return 2

    @property
    def size(self) -> int:
        """How many elements there are in all."""
        return self.values.size

    def longest(self, rows: np.ndarray) -> int:
        """Return the length of the longest of some lists, 0 without lists."""
        return int((self.offsets[rows + 1] - self.offsets[rows]).max(initial=0))

    def take(self, rows: Iterable[int]) -> list[np.ndarray]:
        """Some lists, each as an array (places,)."""
        return [self.values[self.offsets[row] : self.offsets[row + 1]] for row in rows]

    def cut_off(self, longest: int) -> Lists:
        """The lists without what lies behind their first `longest` elements."""
        return self if self.shape[1] <= longest else self.cut_at(np.full(len(self), longest, np.int64))

    def cut_at(self, lengths: np.ndarray) -> Lists:
        """The lists without what lies behind so many elements, a number for each, int64 (N,)."""
        before = self.lengths
        places = np.arange(len(self.values)) - np.repeat(self.offsets[:-1], before)
        return Lists.cut(self.values[places < np.repeat(lengths, before)], np.minimum(before, lengths))

    def only(self, rows: np.ndarray) -> Lists:
        """The lists of these numbers, int64 (n,)."""
        lengths = self.lengths[rows]
        return Lists.cut(np.concatenate([self.values[:0], *self.take(rows)]), lengths)

    def blocks(self, elements: int) -> Iterator[tuple[int, np.ndarray]]:
        """The lists in arrays (n, longest) of about so many elements, with the number of the first list of each.

        Behind the end of a list its last element is repeated; lists without elements are left out at their ends.
        """
        rows = max(elements // max(self.shape[1], 1), 1)
        for start in range(0, len(self), rows):
            some = [
                row if len(row) else self.values[:1] for row in self.take(range(start, min(start + rows, len(self))))
            ]
            if self.size:
                longest = max(map(len, some))
                yield start, np.stack([np.pad(row, (0, longest - len(row)), "edge") for row in some])


def padded(rows: Sequence[np.ndarray], length: int, fill: int) -> np.ndarray:
    """Arrays (places,) as rows of one (n, length), with `fill` behind each."""
    found = np.full((len(rows), length), fill, rows[0].dtype if rows else np.int64)
    for row, values in zip(found, rows, strict=True):
        row[: len(values)] = values
    return found
