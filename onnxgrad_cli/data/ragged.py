"""Store samples that are arrays of different shapes, such as molecules, and combine them into batches.

A batch of one sample needs no padding. A larger batch is padded with zeros to its largest sample, but only if the model
and the losses take a mask, because otherwise the padding would change the loss.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from onnxgrad_cli.data.input_types import InputTypes
from onnxgrad_cli.data.lists import Lists, padded
from onnxgrad_cli.errors import wrong_shape
from onnxgrad_cli.ir.types import shape_of
from onnxgrad_cli.metadata import Term

ONE_BY_ONE = (
    "use `batch_size=1` with `accumulate=N`: no padding, and a step takes N samples; or use a model and a loss that "
    "take a mask: an input called mask, and a Python function with a parameter annotated 'mask INPUT'"
)


@dataclass(frozen=True)
class Ragged:
    """A column of arrays with the same number of axes. The arrays may differ in shape.

    Attributes:
        elements: the elements of each array, in order.
        shapes: the shape of each array, int64 (N, axes).
    """

    elements: Lists
    shapes: np.ndarray

    @classmethod
    def of_lists(cls, lists: Lists) -> Ragged:
        """Return a column of arrays with one axis."""
        return cls(lists, lists.lengths[:, None])

    @classmethod
    def of_arrays(cls, arrays: Sequence[np.ndarray]) -> Ragged:
        """Return a column of arrays, which have the same number of axes."""
        shapes = np.array([array.shape for array in arrays], np.int64)
        return cls(Lists.cut(np.concatenate([array.reshape(-1) for array in arrays]), shapes.prod(1)), shapes)

    def __len__(self) -> int:
        return len(self.elements)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the elements."""
        return self.elements.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of arrays and the largest size of each axis."""
        return len(self), *map(int, self.shapes.max(0, initial=0))

    @property
    def ndim(self) -> int:
        """The number of axes, including the axis of the samples."""
        return 1 + self.shapes.shape[1]

    @property
    def size(self) -> int:
        """The number of elements of all arrays."""
        return self.elements.size

    def take(self, rows: Iterable[int]) -> list[np.ndarray]:
        """Return the arrays with the indices `rows`."""
        rows = list(rows)
        return [each.reshape(self.shapes[row]) for row, each in zip(rows, self.elements.take(rows), strict=True)]

    def samples(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield each array with its index, as a batch of one sample."""
        for row in range(len(self)):
            yield row, self.take([row])[0][None]


def cut(values: np.ndarray, sizes: np.ndarray) -> np.ndarray | Ragged:
    """Cut concatenated samples apart. Return a plain array if all samples have the same shape.

    Args:
        values: the samples, concatenated along their first axis; or the elements of all samples, if `sizes` has a whole
            shape for each sample.
        sizes: the size of each sample along its first axis, integers (N,); or the shape of each sample, (N, axes).

    Raises:
        ValueError: the sizes are not whole numbers of at least 0, or don't add up to the number of elements.
    """
    if sizes.dtype.kind not in "iu" or sizes.ndim not in (1, 2) or (sizes < 0).any():
        raise ValueError("sizes are whole numbers, one for each sample, or a shape for each sample")
    shapes = sizes.astype(np.int64)
    if sizes.ndim == 1:
        shapes = np.stack([shapes, *(np.full(len(sizes), size, np.int64) for size in values.shape[1:])], 1)
    if shapes.prod(1).sum() != values.size:
        raise ValueError(f"the sizes add up to {shapes.prod(1).sum():,} elements, but there are {values.size:,}")
    if len(shapes) and (shapes == shapes[0]).all():
        return values.reshape(len(shapes), *shapes[0])
    return Ragged(Lists.cut(values.reshape(-1), shapes.prod(1)), shapes)


@dataclass(frozen=True)
class Padding:
    """The rules for combining samples of different shapes into a batch.

    Attributes:
        masks: mask that the data lack -> a column and one of its axes. The mask is 1 for real entries along this axis,
            and 0 for padding.
        fill: label -> its value in the padding; 0 for columns that are not listed.
        obstacle: the reason why samples can't be padded; "" if they can.
        note: a message about the masks that are computed; "" if there are none.
    """

    masks: Mapping[str, tuple[str, int]]
    fill: Mapping[str, int]
    obstacle: str
    note: str = ""

    def batch(self, taken: Mapping[str, np.ndarray | list[np.ndarray]]) -> dict[str, np.ndarray]:
        """Convert the samples of a batch to arrays, and compute the masks.

        Args:
            taken: input -> its samples: one array (n, ...), or a list of arrays.

        Raises:
            UsageError: the samples have different shapes and can't be padded.
        """
        found = {name: self._stacked(name, each) if isinstance(each, list) else each for name, each in taken.items()}
        for mask, (name, axis) in self.masks.items():
            sizes = np.array([sample.shape[axis - 1] for sample in taken[name]])
            found[mask] = np.arange(found[name].shape[axis]) < sizes[:, None]
        return found

    def _stacked(self, name: str, samples: list[np.ndarray]) -> np.ndarray:
        if len({sample.shape for sample in samples}) == 1:
            return np.stack(samples)
        if self.obstacle:
            raise wrong_shape(f"samples of different sizes can't be in one batch: {self.obstacle}", ONE_BY_ONE)
        return padded(samples, np.max([sample.shape for sample in samples], 0).tolist(), self.fill.get(name, 0))


def padding_of(
    columns: Mapping[str, object], inputs: InputTypes, terms: Sequence[Term], same: Collection[str]
) -> Padding | None:
    """Return the rules for combining samples of different shapes into a batch.

    Return None for data without such samples and without masks to compute.

    Samples can be padded if, for each axis along which they differ, the model or a loss takes a mask, and each loss
    ignores the padding of its labels: it takes the mask, or has a label value to ignore.

    Args:
        columns: the samples of the inputs that the data have.
        inputs: the inputs and labels, with their types.
        terms: the losses.
        same: the inputs that are the same for all samples.
    """
    ragged = {name: column for name, column in columns.items() if isinstance(column, Ragged)}
    masks = {name: (shape_of(inputs[name]) or ())[1] for name in masks_of(inputs, terms)}
    there = columns.keys() - same
    made = {mask: place for mask, dim in masks.items() if mask not in columns and (place := _along(dim, inputs, there))}
    if not ragged and not made:
        return None
    # columns with another number of axes are refused by `validate.check`
    fits = [name for name, column in ragged.items() if len(shape_of(inputs[name]) or ()) == column.ndim]
    obstacles = [text for name in fits for text in _obstacles(name, ragged[name], inputs, terms, masks)]
    if ragged:
        obstacles += [f"the loss {term.name} takes no mask" for term in terms if not term.label and not term.mask]
    fill = {term.label: term.ignore_index for term in terms if term.label in fits and term.ignore_index is not None}
    names = ", ".join(f"'{name}'" for name in made)
    note = f"computing masks, which are 1 for real entries and 0 for padding: {names}" if made else ""
    return Padding(made, fill, next(iter(obstacles), ""), note)


def _obstacles(
    name: str, column: Ragged, inputs: InputTypes, terms: Sequence[Term], masks: Mapping[str, int | str]
) -> Iterator[str]:
    """Yield the reasons why samples of different shapes of one input can't be padded."""
    shape = shape_of(inputs[name]) or ()
    dims = {shape[axis + 1] for axis, size in enumerate(np.ptp(column.shapes, axis=0)) if size}
    readers = [term for term in terms if name in (term.label, *term.more)]
    for term in readers:
        ignores = name == term.label and term.ignore_index is not None
        if not ignores and (not term.mask or dims != {masks.get(term.mask)}):
            yield f"the loss {term.name} takes no mask for '{name}'"
    lacking = dims - set(masks.values())
    if not readers and lacking:
        yield f"no mask shows the real entries of '{name}' along its axis '{min(map(str, lacking))}'"


def masks_of(inputs: InputTypes, terms: Sequence[Term]) -> list[str]:
    """Return the names of masks: the masks of losses, and inputs [batch, entries] called mask or ending in _mask.

    Names with "pad" are left out, because such masks, as in PyTorch, are often true for padding.
    """
    labels = {name for term in terms for name in (term.label, *term.more)}
    of_losses = {term.mask for term in terms}

    def is_mask(name: str) -> bool:
        named = f"_{name}".endswith("_mask") and "pad" not in name and name not in labels
        return name in of_losses or (named and len(shape_of(inputs[name]) or ()) == 2)

    return list(filter(is_mask, inputs))


def _along(dim: int | str, inputs: InputTypes, columns: Collection[str]) -> tuple[str, int] | None:
    """Return the first column with an axis of the size or symbol `dim`, and this axis; None if there is none."""
    for name, kind in inputs.items():
        shape = shape_of(kind) or ()
        if name in columns and dim in shape[1:] and dim != "?":
            return name, shape.index(dim, 1)
    return None
