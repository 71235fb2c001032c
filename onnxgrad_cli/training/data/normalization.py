"""Numbers brought to mean 0 and deviation 1 before a model is fed them, for each channel of pictures or column."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from onnx import TypeProto

from onnxgrad_cli.common.narration import Tell
from onnxgrad_cli.errors import UsageError, suggest
from onnxgrad_cli.ir.types import in_words, shape_of
from onnxgrad_cli.training.data.picture_layout import layout_of

PIXEL = 255.0
"""What bytes of pictures are divided by."""

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and deviation of the channels of ImageNet's pictures, of pixels from 0 to 1. Source: torchvision.models."""

FORM = "auto, imagenet, none, or MEAN/STD such as 0.5/0.25 or 0.4,0.5,0.6/0.2,0.2,0.2"


class Samples(Protocol):
    """Samples as they were read, of which numbers are taken."""

    def column(self, name: str) -> Iterable[np.ndarray]:
        """The samples of an input, in blocks."""


@dataclass(frozen=True)
class Normalization:
    """What becomes of the numbers of an input: (x / scale - mean) / std, in which bytes alone are divided by the scale.

    Attributes:
        scale: what bytes are divided by.
        mean, std: one number, or one for each place along an axis.
        axis: that axis of a batch; None for one number.
    """

    scale: float = 1.0
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    axis: int | None = None

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """The numbers of a batch, as float32; as float64 where they are of more than 24 bits, like dates."""
        wide = x.dtype.itemsize > (4 if x.dtype.kind == "f" else 2)
        kind = np.dtype(np.float64 if wide else np.float32)
        found = x.astype(kind)
        if x.dtype == np.uint8:
            found = found / kind.type(self.scale)
        return (found - self._along(self.mean, found)) / self._along(self.std, found)

    def _along(self, values: Sequence[float], x: np.ndarray) -> np.ndarray:
        array = np.array(values, x.dtype)
        if self.axis is None or len(values) == 1:
            return array.reshape(())
        if self.axis >= x.ndim or len(array) != x.shape[self.axis]:
            raise UsageError(
                f"a normalization has {len(array)} numbers for axis {self.axis}, and a batch is {list(x.shape)}",
                "give others with `normalize`, which take the place of those that the model says",
            )
        return array.reshape([-1 if axis == self.axis else 1 for axis in range(x.ndim)])

    def __str__(self) -> str:
        scaled = f"bytes / {self.scale:g}, then " if self.scale != 1 else ""
        return f"{scaled}mean {_listed(self.mean)} and deviation {_listed(self.std)}"

    @property
    def is_pixels_alone(self) -> bool:
        """Whether bytes are divided, and nothing else is done."""
        return self.mean == (0.0,) and self.std == (1.0,)

    def to_json(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {"scale": self.scale, "mean": list(self.mean), "std": list(self.std), "axis": self.axis}

    @classmethod
    def of_json(cls, said: Mapping[str, Any]) -> Normalization:
        """What `to_json` gave.

        Raises:
            ValueError, KeyError, TypeError: it is something else.
        """
        if not isinstance(said, Mapping) or not all(isinstance(said.get(name), list) for name in ("mean", "std")):
            raise ValueError("a normalization is none")
        scale, axis = float(said["scale"]), said["axis"]
        mean, std = (tuple(map(float, said[name])) for name in ("mean", "std"))
        if not all(map(math.isfinite, (scale, *mean, *std))) or min((scale, *std)) <= 0 or axis not in (None, 1, 3):
            raise ValueError("a normalization is none")
        if not mean or len(mean) != len(std):
            raise ValueError("mean and deviation are not as many")
        return cls(scale, mean, std, axis)


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values[:4]) + (", ..." if len(values) > 4 else "")


def tell_known(normal: Mapping[str, Normalization], before: str, tell: Tell) -> None:
    """Tell which normalizations nobody has asked for now, as they are those of the training; bytes are always divided.

    Args:
        normal: by the names of inputs.
        before: what training that was.
        tell: takes what is narrated.
    """
    for name, each in normal.items():
        if not each.is_pixels_alone:
            tell(f"'{name}' is normalised as in {before}: {each}", 0)


def normalizations(
    asked: Sequence[str],
    inputs: Mapping[str, TypeProto],
    samples: Samples,
    before: Mapping[str, Normalization],
    tell: Tell,
) -> dict[str, Normalization]:
    """How each input of floats is normalised.

    Args:
        asked: `SampleOptions.normalize`.
        inputs: the inputs of floats, without labels, with their types.
        samples: the training data, for 'auto'.
        before: what holds where nothing is asked.
        tell: takes what is narrated.

    Raises:
        UsageError: there is no such normalization or input, or the input is none that it is for.
    """
    found = dict(before)
    for text in asked:
        owner, _, how = text.rpartition(":")
        if owner and owner not in inputs:
            raise UsageError(f"`normalize`: there is no input '{owner}' of floats", suggest(owner, inputs, "inputs"))
        names = [owner] if owner else _meant(how, inputs)
        for name in names:
            found[name] = _normalization(how, name, inputs[name], samples, tell)
    return {name: each for name, each in found.items() if each != Normalization()}


def warn_of_bytes(
    asked: Sequence[str],
    inputs: Mapping[str, TypeProto],
    samples: Samples,
    normal: Mapping[str, Normalization],
    tell: Tell,
) -> None:
    """Warn of unscaled bytes of pictures, because most models expect pixels from 0 to 1, or normalized pixels.

    Only the first block is read for the range, so that no large file is read twice.

    Args:
        asked, inputs, samples, tell: see `normalizations`.
        normal: the result of `normalizations`.
    """
    declined = {owner for owner, _, how in (text.rpartition(":") for text in asked) if how == "none"}
    for name, kind in inputs.items():
        if name in normal or declined & {name, ""} or not _takes_pictures(kind):
            continue
        block = next(iter(samples.column(name)), np.zeros(0))
        if block.dtype == np.uint8 and block.size and block.max() > 1:
            tell(
                f"caution: '{name}' is fed bytes from {block.min()} to {block.max()} as they are: "
                f"`normalize='{name}:0/1'` divides them by 255, `normalize='{name}:none'` keeps them",
                0,
            )


def _takes_pictures(kind: TypeProto) -> bool:
    try:
        return layout_of(kind) is not None
    except UsageError:  # the axis of the channels is unknown, so that no normalization can be asked for
        return False


def _meant(how: str, inputs: Mapping[str, TypeProto]) -> list[str]:
    """The inputs that are meant where none is named: all for which it can be done; of numbers that are given, one."""
    fit = [name for name, kind in inputs.items() if how == "none" or _axis(kind, how == "imagenet") is not False]
    if not fit:
        held = "; ".join(f"'{name}' is {in_words(kind)}" for name, kind in inputs.items()) or "there are no floats"
        what = "pictures of 3 channels" if how == "imagenet" else "pictures, columns or numbers"
        raise UsageError(f"`normalize`: no input takes {what}: {held}", "leave it out")
    if len(fit) > 1 and "/" in how:
        raise UsageError(f"`normalize`: '{how}' may be of {', '.join(fit)}", f"name the input: {fit[0]}:{how}")
    return fit


def _axis(kind: TypeProto, of_three: bool = False) -> int | bool | None:
    """The axis along which there is a number each, None for one number; False where an input is of another kind."""
    shape = shape_of(kind)
    if shape is None:
        return False
    layout = layout_of(kind)
    if of_three:
        return layout.axis if layout is not None and layout.channels == 3 else False
    if layout is not None:
        return layout.axis
    return {1: None, 2: 1}.get(len(shape), False)


def _normalization(how: str, name: str, kind: TypeProto, samples: Samples, tell: Tell) -> Normalization:
    if how == "none":
        return Normalization()
    axis = _axis(kind, how == "imagenet")
    if axis is False:
        what = "pictures of 3 channels" if how == "imagenet" else "pictures, columns or numbers"
        raise UsageError(f"`normalize`: '{name}' is {in_words(kind)}, which takes no {what}", "leave it out")
    pixels = len(shape_of(kind) or ()) > 2
    scale = PIXEL if pixels else 1.0
    if how == "imagenet":
        _check_pixels(name, samples)
        found = Normalization(scale, *IMAGENET, axis)
    elif how == "auto":
        found = _measured(name, samples, scale, axis, tell)
    else:
        found = _given(how, name, kind, scale, axis)
    tell(f"'{name}' is normalised by {found}", 0)
    return found


def _given(how: str, name: str, kind: TypeProto, scale: float, axis: int | None) -> Normalization:
    parts = re.fullmatch(r"([^/]+)/([^/]+)", how)
    try:
        if parts is None:
            raise ValueError
        mean, std = (tuple(float(number) for number in part.split(",")) for part in parts.groups())
    except ValueError:
        raise UsageError(f"`normalize`: '{how}' is none of the forms there are", FORM) from None
    if not all(map(math.isfinite, (*mean, *std))) or min(std) <= 0:
        raise UsageError(f"`normalize`: '{how}': deviations are finite numbers above 0, means finite numbers", FORM)
    size = (shape_of(kind) or ())[axis] if axis is not None else 1
    most = max(len(mean), len(std))
    if any(len(part) not in (1, most) for part in (mean, std)) or (most > 1 and size not in (most, str(size))):
        raise UsageError(f"`normalize`: '{how}' has {most} numbers, '{name}' is {in_words(kind)}", FORM)
    means, deviations = (part * most if len(part) == 1 else part for part in (mean, std))
    return Normalization(scale, means, deviations, axis)


def _check_pixels(name: str, samples: Samples) -> None:
    """Make sure that floats are pixels from 0 to 1, of which ImageNet's mean is."""
    for block in samples.column(name):
        if block.dtype != np.uint8 and block.size and not (block.min() >= 0 and block.max() <= 1):
            raise UsageError(
                f"`normalize`: '{name}' holds {block.min():g} to {block.max():g}; imagenet is of pixels from 0 to 1",
                "save bytes (array.astype(numpy.uint8)), divide by 255, or leave it out if they are normalised",
            )


def _measured(name: str, samples: Samples, scale: float, axis: int | None, tell: Tell) -> Normalization:
    """Mean and deviation of the training data, merged block by block as in Chan, Golub and LeVeque, 1979."""
    count, mean, spread = 0, np.zeros(1), np.zeros(1)
    for block in samples.column(name):
        x = block.astype(np.float64) / (scale if block.dtype == np.uint8 else 1.0)
        rows = x.reshape(-1, 1) if axis is None else np.moveaxis(x, axis, -1).reshape(-1, x.shape[axis])
        if not len(rows):
            continue
        own = rows.mean(0)
        shift, share = own - mean, len(rows) / (count + len(rows))
        spread = spread + np.square(rows - own).sum(0) + shift**2 * count * share
        mean, count = mean + shift * share, count + len(rows)
    std = np.sqrt(spread / max(count, 1))
    flat = std <= 1e-12 * np.maximum(1.0, np.abs(mean))
    if flat.any():
        places = ", ".join(map(str, np.flatnonzero(flat)[:8]))
        tell(f"'{name}' never changes at {places} (the first is 0): its mean is taken off alone", 0)
    return Normalization(scale, tuple(mean.tolist()), tuple(np.where(flat, 1.0, std).tolist()), axis)
