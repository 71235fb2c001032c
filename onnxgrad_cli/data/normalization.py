"""Normalize inputs to mean 0 and standard deviation 1, separately for each channel of pictures or each column."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import TypeProto

from onnxgrad_cli.common.narration import Tell
from onnxgrad_cli.data.pictures import layout_of
from onnxgrad_cli.errors import UsageError, ambiguous, suggest, unknown_name, wrong_shape, wrong_value
from onnxgrad_cli.ir.types import in_words, shape_of

PIXEL = 255.0
"""The number by which the bytes of pictures are divided."""

LEAST_BRIGHT = 200
"""Columns of bytes that reach this value are taken for flattened pictures. Counts and categories are mostly smaller."""

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of ImageNet's channels, for pixels from 0 to 1. Source: torchvision.models."""

FORM = "use auto, imagenet, none, or MEAN/STD such as 0.5/0.25 or 0.4,0.5,0.6/0.2,0.2,0.2"

Samples = Callable[[str], Iterable[np.ndarray]]
"""A function that yields the samples of an input in blocks, not normalized, such as `Data.column`."""


@dataclass(frozen=True)
class Normalization:
    """The normalization of an input: (x / scale - mean) / std for bytes, (x - mean) / std for other dtypes.

    Attributes:
        scale: the number by which bytes are divided.
        mean, std: one value, or one for each index along `axis`.
        axis: the axis of a batch for which mean and std have a value per index; None if they have a single value.
    """

    scale: float = 1.0
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    axis: int | None = None

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Normalize a batch.

        The result is float32; it is float64 if float32 can't represent the dtype's values exactly.
        """
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
            message = f"the normalization has {len(array)} numbers for axis {self.axis}, but a batch is {list(x.shape)}"
            raise wrong_shape(message, "pass other numbers with `normalize`: they replace those that the model stores")
        return array.reshape([-1 if axis == self.axis else 1 for axis in range(x.ndim)])

    def __str__(self) -> str:
        scaled = f" (after bytes are divided by {self.scale:g})" if self.scale != 1 else ""
        return f"mean {_listed(self.mean)} and standard deviation {_listed(self.std)}{scaled}"

    def to_json(self) -> dict[str, Any]:
        """Return the normalization as a dict for JSON."""
        return {"scale": self.scale, "mean": list(self.mean), "std": list(self.std), "axis": self.axis}

    @classmethod
    def of_json(cls, said: Mapping[str, Any]) -> Normalization:
        """Create a normalization from the result of `to_json`.

        Raises:
            ValueError, KeyError, TypeError: `said` is not a valid result of `to_json`.
        """
        scale, axis = float(said["scale"]), said["axis"]
        mean, std = (tuple(map(float, said[name])) for name in ("mean", "std") if isinstance(said[name], list))
        if not all(map(math.isfinite, (scale, *mean, *std))) or min((scale, *std)) <= 0 or axis not in (None, 1, 3):
            raise ValueError("a normalization is not valid")
        if not mean or len(mean) != len(std):
            raise ValueError("a mean and a standard deviation differ in length")
        return cls(scale, mean, std, axis)


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values[:4]) + (", ..." if len(values) > 4 else "")


def normalizations(
    asked: Sequence[str], inputs: Mapping[str, TypeProto], known: Mapping[str, Normalization], samples: Samples,
    before: str, settled: bool, tell: Tell,
) -> dict[str, Normalization]:  # fmt: skip
    """Return a map: input -> its normalization. Inputs without a request in `asked` keep their normalization.

    Args:
        asked: the user's requests; see `SampleOptions.normalize`.
        inputs: the float inputs, without labels, with their types.
        known: input -> the normalization that it has.
        samples: the data; 'auto' computes their mean and standard deviation.
        before: a description of the training that determined `known`, for messages.
        settled: keep `known` and ignore `asked`.
        tell: receives log messages.

    Raises:
        UsageError: a normalization or an input is unknown, or the input does not have a suitable shape.
    """
    found = dict(known)
    for text in () if settled else asked:
        owner, _, how = text.rpartition(":")
        if owner and owner not in inputs:
            hint = suggest(owner, inputs, "inputs")
            raise unknown_name(f"`normalize`: there is no float input '{owner}'", hint)
        for name in _meant(how, {owner: inputs[owner]} if owner else inputs):
            found[name] = _normalization(how, name, inputs[name], samples, tell)
    normal = {name: each for name, each in found.items() if each != Normalization()}
    _warn_of_bytes(asked, {name: kind for name, kind in inputs.items() if name not in normal}, samples, tell)
    if settled or not asked:
        for name, each in normal.items():
            if (each.mean, each.std) != ((0.0,), (1.0,)):  # the division of bytes is not reported
                tell(f"'{name}' is normalized as in {before}: {each}", 0)
    return normal


def _warn_of_bytes(asked: Sequence[str], inputs: Mapping[str, TypeProto], samples: Samples, tell: Tell) -> None:
    """Warn of pictures that are fed as bytes, because most models expect pixels from 0 to 1, or normalized pixels.

    Columns of bytes are taken for flattened pictures if they reach `LEAST_BRIGHT`. The range is taken from the first
    block only, so that no large file is read twice.

    Args:
        asked, samples, tell: see `normalizations`.
        inputs: the inputs of floats that are not normalized.
    """
    declined = {owner for owner, _, how in (text.rpartition(":") for text in asked) if how == "none"}
    for name, kind in inputs.items():
        pictures, flat = _takes_pictures(kind), len(shape_of(kind) or ()) == 2
        if declined & {name, ""} or not (pictures or flat):
            continue
        block = next(iter(samples(name)), np.zeros(0))
        if block.dtype == np.uint8 and block.size and block.max() >= (2 if pictures else LEAST_BRIGHT):
            tell(
                f"caution: '{name}' gets unscaled bytes from {block.min()} to {block.max()}: "
                f"`normalize='{name}:0/{1 if pictures else 255}'` divides them by 255, `normalize='{name}:none'` keeps "
                "them", 0,
            )  # fmt: skip


def _takes_pictures(kind: TypeProto) -> bool:
    try:
        return layout_of(kind) is not None
    except UsageError:  # the axis of the channels is unknown, so that the input can't be normalized
        return False


def _meant(how: str, inputs: Mapping[str, TypeProto]) -> list[str]:
    """Return the inputs that the normalization `how` fits.

    Raises:
        UsageError: the normalization fits no input, or it is MEAN/STD and fits several inputs.
    """
    fit = [name for name, kind in inputs.items() if how == "none" or _axis(kind, how == "imagenet") is not False]
    if not fit:
        kinds = "; ".join(f"'{name}' is {in_words(kind)}" for name, kind in inputs.items())
        what = "pictures of 3 channels" if how == "imagenet" else "pictures, columns or numbers"
        raise wrong_shape(f"`normalize`: no float input takes {what}{': ' * bool(kinds)}{kinds}", "leave it out")
    if len(fit) > 1 and "/" in how:
        hint = f"name the input: {fit[0]}:{how}"
        raise ambiguous(f"`normalize`: '{how}' fits several inputs: {', '.join(fit)}", hint)
    return fit


def _axis(kind: TypeProto, of_three: bool = False) -> int | bool | None:
    """Return the axis that has a mean per index, None for a single mean, or False if the input can't be normalized.

    Args:
        kind: the type of the input.
        of_three: require pictures of 3 channels.
    """
    shape = shape_of(kind)
    if shape is None:
        return False
    layout = layout_of(kind)
    if layout is not None:
        return layout.axis if layout.channels == 3 or not of_three else False
    return False if of_three else {1: None, 2: 1}.get(len(shape), False)


def _normalization(how: str, name: str, kind: TypeProto, samples: Samples, tell: Tell) -> Normalization:
    if how == "none":
        return Normalization()
    axis, scale = _axis(kind), PIXEL if len(shape_of(kind) or ()) > 2 else 1.0
    if how == "imagenet":
        _check_pixels(name, samples)
        found = Normalization(scale, *IMAGENET, axis)
    elif how == "auto":
        found = _measured(name, samples, scale, axis, tell)
    else:
        found = _given(how, name, kind, scale, axis)
    tell(f"'{name}' is normalized: {found}", 0)
    return found


def _given(how: str, name: str, kind: TypeProto, scale: float, axis: int | None) -> Normalization:
    try:
        mean, std = (tuple(map(float, part.split(","))) for part in how.split("/"))
    except ValueError:
        raise wrong_value(f"`normalize`: '{how}' is not a known normalization", FORM) from None
    if not all(map(math.isfinite, (*mean, *std))) or min(std) <= 0:
        raise wrong_value(f"`normalize`: '{how}': means must be finite, deviations finite and above 0", FORM)
    size = (shape_of(kind) or ())[axis] if axis is not None else 1
    most = max(len(mean), len(std))
    if any(len(part) not in (1, most) for part in (mean, std)) or (most > 1 and size not in (most, str(size))):
        raise wrong_shape(f"`normalize`: '{how}' has {most} numbers, but '{name}' is {in_words(kind)}", FORM)
    means, deviations = (part * most if len(part) == 1 else part for part in (mean, std))
    return Normalization(scale, means, deviations, axis)


def _check_pixels(name: str, samples: Samples) -> None:
    """Check that float pixels lie between 0 and 1, the range for which ImageNet's mean and deviation are given."""
    hint = "save bytes (array.astype(numpy.uint8)), divide by 255, or leave out the normalization if it was done"
    for block in samples(name):
        if block.dtype != np.uint8 and block.size and not (block.min() >= 0 and block.max() <= 1):
            bounds = f"{block.min():g} to {block.max():g}"
            raise wrong_value(f"`normalize`: '{name}' has {bounds}, but imagenet needs pixels from 0 to 1", hint)


def _measured(name: str, samples: Samples, scale: float, axis: int | None, tell: Tell) -> Normalization:
    """Compute the mean and standard deviation of the data. Blocks are merged as in Chan, Golub and LeVeque, 1979."""
    count, mean, spread = 0, np.zeros(1), np.zeros(1)
    for block in samples(name):
        x = block.astype(np.float64) / (scale if block.dtype == np.uint8 else 1.0)
        rows = x.reshape(-1, 1) if axis is None else np.moveaxis(x, axis, -1).reshape(-1, x.shape[axis])
        if not len(rows):
            continue
        if count and rows.shape[1] != len(mean):
            message = f"`normalize`: samples of '{name}' differ in size along axis {axis}, so there is no mean"
            raise wrong_shape(message, "normalize the data yourself, or use MEAN/STD")
        own = rows.mean(0)
        shift, share = own - mean, len(rows) / (count + len(rows))
        spread = spread + np.square(rows - own).sum(0) + shift**2 * count * share
        mean, count = mean + shift * share, count + len(rows)
    std = np.sqrt(spread / max(count, 1))
    flat = std <= 1e-12 * np.maximum(1.0, np.abs(mean))
    if flat.any():
        places = ", ".join(map(str, np.flatnonzero(flat)[:8]))
        tell(f"'{name}' has constant values at {places} (the first is 0): only the mean is subtracted there", 0)
    return Normalization(scale, tuple(mean.tolist()), tuple(np.where(flat, 1.0, std).tolist()), axis)
