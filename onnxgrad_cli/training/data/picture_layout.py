"""Which axes of an input of pictures are which: found from its shape, never guessed."""

from __future__ import annotations

from dataclasses import dataclass

from onnx import TypeProto

from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.ir.types import in_words, shape_of

CHANNELS = (1, 3, 4)
"""How many channels pictures have: grey, red-green-blue, and these with transparency."""


@dataclass(frozen=True)
class Layout:
    """The shape of a picture as an input takes it.

    Attributes:
        channels, height, width: its sizes; a height or width of 0 is not fixed.
        axis: the axis of channels in a batch, 1 or 3; None where there is none, for one of grey pictures.
    """

    channels: int
    height: int
    width: int
    axis: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one picture."""
        sizes = [self.height, self.width]
        if self.axis is not None:
            sizes.insert(self.axis - 1, self.channels)
        return tuple(sizes)


def layout_of(value_type: TypeProto) -> Layout | None:
    """The layout of an input, [N, C, H, W], [N, H, W, C] or [N, H, W]; None where it takes no pictures.

    Raises:
        UsageError: both the second and the last axis could be the channels.
    """
    shape = shape_of(value_type) or ()
    if len(shape) == 3:
        return Layout(1, _size(shape[1]), _size(shape[2]), None)
    if len(shape) != 4:
        return None
    first, last = shape[1] in CHANNELS, shape[3] in CHANNELS
    if first and last:
        raise UsageError(
            f"the input is {in_words(value_type)}: the channels may be its second or its last axis",
            "save arrays of its shape in place of pictures",
        )
    if not first and not last:
        return None
    axis = 1 if first else 3
    height, width = (shape[2], shape[3]) if first else (shape[1], shape[2])
    return Layout(_size(shape[axis]), _size(height), _size(width), axis)


def _size(dim: int | str) -> int:
    return dim if isinstance(dim, int) else 0
