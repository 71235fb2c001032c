"""Pictures changed at random in training, so that a model sees each of them in many ways.

What is done to a picture follows from the seed, the epoch and its place in it alone, so that a run that goes on, or
that is shared by several processes, does the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from onnx import TypeProto

from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.ir.types import in_words, shape_of
from onnxgrad_cli.training.data.part import Part
from onnxgrad_cli.training.data.picture_layout import layout_of

MARGIN = 8
"""One over the share of a picture by which it is moved at most: 4 of 32 pixels, as is usual for CIFAR."""


@dataclass(frozen=True)
class Augmentations:
    """What is done to pictures.

    Attributes:
        names: 'flip', 'crop' or both.
        axes: input of pictures -> the axes of its height and width in a batch.
        seed: of the random numbers.
    """

    names: tuple[str, ...]
    axes: Mapping[str, tuple[int, int]]
    seed: int

    def __call__(self, batch: Mapping[str, np.ndarray], part: Part) -> dict[str, np.ndarray]:
        """The arrays of a batch, with its pictures changed; all inputs of a sample alike."""
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


def drawn(seed: int, part: Part, row: int = 0) -> np.random.Generator:
    """What draws random numbers for a sample of a batch; a stream besides that of the order."""
    return np.random.Generator(
        np.random.PCG64(np.random.SeedSequence((seed, part.epoch, part.first + row), spawn_key=(1,)))
    )


def _move(picture: np.ndarray, axis: int, move: np.ndarray) -> None:
    """Move a picture along two axes, in place; where nothing is left it is 0, which is black."""
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
    """What is to be done to the inputs of pictures.

    Raises:
        UsageError: there are none, or a label has places in a picture too, which would have to change with it.
    """
    if not names:
        return None
    axes = {}
    for name, kind in inputs.items():
        layout = layout_of(kind)
        if layout is not None:
            height = 2 if layout.axis == 1 else 1
            axes[name] = (height, height + 1)
    if not axes:
        said = ", ".join(f"'{name}' is {in_words(kind)}" for name, kind in inputs.items())
        raise UsageError(f"`augment`: no input takes pictures: {said}", "leave it out")
    for name, kind in labels.items():
        if len(shape_of(kind) or ()) > 2:
            raise UsageError(
                f"`augment`: the label '{name}' is {in_words(kind)}, and would have to change with the pictures",
                "leave it out: labels with places in a picture are not changed",
            )
    return Augmentations(names, axes, seed)
