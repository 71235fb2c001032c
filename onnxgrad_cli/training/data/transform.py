"""A user's function of batches, which changes samples before a model is fed them."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.training.data.augmentation import drawn
from onnxgrad_cli.training.data.part import Part
from onnxgrad_cli.training.data.sample_options import Transform

HINT = "it takes a dict, input -> array with the samples along the first axis, and returns such a dict"


@dataclass(frozen=True)
class Transformed:
    """A function of batches, `function(batch)` or `function(batch, random)`.

    The second form is given a numpy.random.Generator in training, which follows from the seed, the epoch and the place
    in it; and None for data that are not trained on, of which nothing is to be drawn.

    Attributes:
        function, seed: as given.
        draws: whether it takes random numbers.
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
            raise UsageError(f"`transform`: the function takes {count} arguments", f"one or two: {HINT}")
        object.__setattr__(self, "draws", count == 2)

    def __call__(self, batch: dict[str, np.ndarray], part: Part | None) -> dict[str, np.ndarray]:
        """The arrays of a batch after the function, in their types.

        Raises:
            UsageError: it fails, or gives something else than arrays of these types for as many samples.
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
            raise UsageError(f"`transform` gives {said}, the model is fed {', '.join(batch)}", HINT)
        return {name: _fitting(name, found[name], array) for name, array in batch.items()}

    def digest(self) -> str:
        """Eight digits that tell this function from others, by its code."""
        try:
            code = inspect.getsource(self.function)
        except (OSError, TypeError):
            compiled = getattr(self.function, "__code__", None)
            code = repr((getattr(compiled, "co_code", b""), getattr(compiled, "co_names", ())))
        return f"{zlib.crc32(code.encode()):08x}"


def _fitting(name: str, array: object, before: np.ndarray) -> np.ndarray:
    """What the function has given for an input, in its type."""
    found = np.asarray(array)
    if found.ndim != before.ndim or found.shape[:1] != before.shape[:1]:
        raise UsageError(f"`transform` gives '{name}' as {list(found.shape)}, it was {list(before.shape)}", HINT)
    if not np.can_cast(found.dtype, before.dtype, "same_kind"):
        raise UsageError(f"`transform` gives '{name}' as {found.dtype}, the model takes {before.dtype}", HINT)
    return np.asarray(found, before.dtype, order="C")
