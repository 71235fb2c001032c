"""Change batches before they are fed to the model: augment pictures at random, or apply the user's function.

A random change depends only on the seed, the epoch and the sample's position in the epoch. A resumed run and a run of
several processes therefore make the same changes.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from onnx import TypeProto

from onnxgrad_cli.data.batch_shard import BatchShard
from onnxgrad_cli.data.pictures import layout_of
from onnxgrad_cli.errors import OnnxgradError, UsageError, wrong_shape, wrong_type, wrong_value
from onnxgrad_cli.ir.types import in_words, shape_of
from onnxgrad_cli.options.data import Transform

MARGIN = 8
"""A random crop shifts a picture by at most 1 / MARGIN of its size: by 4 of 32 pixels, as is usual for CIFAR."""


@dataclass(frozen=True)
class Augmentations:
    """Random changes to the pictures in a batch.

    Attributes:
        names: the changes: 'flip', 'crop' or both.
        axes: input of pictures -> the axes of its height and width in a batch.
        seed: the seed of the random numbers.
    """

    names: tuple[str, ...]
    axes: Mapping[str, tuple[int, int]]
    seed: int

    def __call__(self, batch: Mapping[str, np.ndarray], part: BatchShard) -> dict[str, np.ndarray]:
        """Return the batch with changed pictures. If a sample has several pictures, all get the same change."""
        found = dict(batch)
        draws = [drawn(self.seed, part, row) for row in range(len(part.indices))]
        flips = np.array([draw.random() < 0.5 for draw in draws], bool)
        moves = np.array([draw.uniform(-1, 1, 2) for draw in draws]).reshape(-1, 2)
        for name, axes in self.axes.items():
            pictures = batch[name].copy()
            if "flip" in self.names:
                pictures[flips] = np.flip(pictures[flips], axes[1])
            if "crop" in self.names:
                sizes = np.array([pictures.shape[axis] for axis in axes])
                for picture, move in zip(pictures, np.rint(moves * (sizes // MARGIN)).astype(int), strict=True):
                    _move(picture, axes[0] - 1, move)
            found[name] = pictures
        return found


def drawn(seed: int, part: BatchShard, row: int = 0) -> np.random.Generator:
    """Return the random generator for one sample of a batch.

    It is independent of the generator that shuffles samples.
    """
    sequence = np.random.SeedSequence((seed, part.epoch, part.first + row), spawn_key=(1,))
    return np.random.Generator(np.random.PCG64(sequence))


def _move(picture: np.ndarray, axis: int, move: np.ndarray) -> None:
    """Shift a picture in place along `axis` and the axis after it. The uncovered pixels become 0, which is black."""
    before, after = [slice(None)] * picture.ndim, [slice(None)] * picture.ndim
    for at, by in zip((axis, axis + 1), move.tolist(), strict=True):
        size = picture.shape[at]
        before[at], after[at] = slice(max(-by, 0), size - max(by, 0)), slice(max(by, 0), size - max(-by, 0))
    kept = picture[tuple(before)].copy()
    picture[...] = 0
    picture[tuple(after)] = kept


def augmentations(
    names: tuple[str, ...], inputs: Mapping[str, TypeProto], labels: Mapping[str, TypeProto], seed: int
) -> Augmentations | None:
    """Return the augmentations for all inputs that take pictures; None if `names` is empty.

    Raises:
        UsageError: no input takes pictures, or a label has more than two axes. Such a label (as in segmentation) has an
            element per position in the picture, which would have to move with the pixels.
    """
    if not names:
        return None
    layouts = {name: layout for name, kind in inputs.items() if (layout := layout_of(kind))}
    if not layouts:
        said = ", ".join(f"'{name}' is {in_words(kind)}" for name, kind in inputs.items())
        raise wrong_shape(f"`augment`: no input takes pictures: {said}", "leave it out")
    for name, kind in labels.items():
        if len(shape_of(kind) or ()) > 2:
            message = f"`augment` can't change the label '{name}' ({in_words(kind)}) in the same way as the pictures"
            raise wrong_shape(message, "leave it out: labels with positions in a picture can't be transformed")
    axes = {name: (2, 3) if layout.axis == 1 else (1, 2) for name, layout in layouts.items()}
    return Augmentations(names, axes, seed)


HINT = "the function takes a dict, input -> array with the samples along the first axis, and returns such a dict"


@dataclass(frozen=True)
class Transformed:
    """The user's function that changes batches: `function(batch)` or `function(batch, random)`.

    In training, `random` is a numpy.random.Generator that depends only on the seed, the epoch and the batch's position
    in the epoch. In evaluation and prediction `random` is None, because such data must not be changed at random.

    Attributes:
        function: the user's function.
        seed: the seed of the random numbers.
        draws: True if the function takes `random`.
    """

    function: Transform
    seed: int
    draws: bool = field(init=False)

    def __post_init__(self) -> None:
        try:
            count = len(inspect.signature(self.function).parameters)
        except (TypeError, ValueError):
            count = 1
        if count not in (1, 2):
            raise wrong_value(f"`transform`: the function takes {count} arguments, not one or two", HINT)
        object.__setattr__(self, "draws", count == 2)

    def __call__(self, batch: dict[str, np.ndarray], part: BatchShard | None) -> dict[str, np.ndarray]:
        """Apply the function to a copy of the batch, and return the resulting arrays, cast to the dtypes of the batch.

        Raises:
            UsageError: the function fails; it returns arrays with other names than the batch has; or an array has
                a different number of samples or axes than before, or a dtype that can't be cast.
        """
        arguments = (None if part is None else drawn(self.seed, part),) if self.draws else ()
        given = {name: array.copy() for name, array in batch.items()}
        try:
            found = self.function(given, *arguments)
        except OnnxgradError:
            raise
        except Exception as error:
            raise UsageError(f"`transform` fails: {type(error).__name__}: {error}", HINT) from error
        if not isinstance(found, Mapping) or set(found) != set(batch):
            said = ", ".join(map(str, found)) if isinstance(found, Mapping) else type(found).__name__
            raise wrong_value(f"`transform` returns {said}, but the model takes {', '.join(batch)}", HINT)
        return {name: _fitting(name, found[name], array) for name, array in batch.items()}

    def digest(self) -> str:
        """Return a checksum of the function's code, as eight hexadecimal digits."""
        try:
            code = inspect.getsource(self.function)
        except (OSError, TypeError):
            compiled = getattr(self.function, "__code__", None)
            code = repr((getattr(compiled, "co_code", b""), getattr(compiled, "co_names", ())))
        return f"{zlib.crc32(code.encode()):08x}"


def _fitting(name: str, array: object, before: np.ndarray) -> np.ndarray:
    """Return the array that the function returned for an input, cast to the dtype that the input had before.

    Raises:
        UsageError: the array has a different number of axes or samples than before, or a dtype that can't be cast.
    """
    found = np.asarray(array)
    if found.ndim != before.ndim or found.shape[:1] != before.shape[:1]:
        change = f"from {list(before.shape)} to {list(found.shape)}"
        raise wrong_shape(f"`transform` changes the shape of '{name}' {change}", HINT)
    if not np.can_cast(found.dtype, before.dtype, "same_kind"):
        raise wrong_type(f"`transform` returns '{name}' as {found.dtype}, but the model takes {before.dtype}", HINT)
    return np.asarray(found, before.dtype, order="C")
