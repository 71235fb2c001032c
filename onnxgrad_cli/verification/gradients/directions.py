"""Gradients to be checked (claims), and the random directions along which they are checked.

A direction moves each entry of a tensor by a random number plus a share of the claim itself. A random direction alone
may be almost orthogonal to a gradient, and then hides an error in it. The slope that a claim predicts is its
inner product with the direction. One pass over a gradient computes the inner products with all directions, slice by
slice, so that a large gradient is never copied.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from onnxgrad_cli.ir.types import Arrays

DIRECTIONS = 4
"""Number of random directions per tensor. They are used in turn, each time with a new random sign."""

SLICE = 1 << 13
"""Entries per slice. In float64 a slice fits into a processor's cache, and BLAS processes it in one thread."""

PERIOD = 262_139
"""Largest number of random numbers in a table; a larger tensor uses them repeatedly.

It is a prime, so the numbers don't repeat along the rows or columns of a tensor.
"""

MIN_TABLE = 4096
"""Smallest number of random numbers in a table."""

UNIFORM = 3**-0.5
"""The root mean square of the uniform distribution between -1 and 1."""


class RandomTable:
    """Uniform random numbers between -1 and 1, as a sequence that repeats.

    Args:
        rng: draws the numbers.
        largest: the number of entries of the largest tensor that uses them.
    """

    def __init__(self, rng: np.random.Generator, largest: int) -> None:
        self.period = min(PERIOD, max(64 * largest, MIN_TABLE))
        self._numbers = np.resize(rng.uniform(-1, 1, self.period), self.period + SLICE)

    def at(self, place: int, count: int) -> np.ndarray:
        """Return a view of `count` numbers from position `place` on; `count` is at most `SLICE`."""
        start = place % self.period
        return self._numbers[start : start + count]


def slices(x: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield the consecutive slices of a flat array: the position as a slice, and the entries in float64."""
    for start in range(0, x.size, SLICE):
        part = slice(start, start + SLICE)
        yield part, x[part].astype(np.float64)


@dataclass
class _Noise:
    """The difference of a gradient at a nearby point from the claim: its inner products with directions and claim."""

    along: np.ndarray
    with_claim: float
    squares: float
    largest: float


@dataclass
class _Tensor:
    """A tensor, its claim, and the inner products of the claim with the random directions.

    Attributes:
        x, claim: flat views of the tensor and its claim.
        shape: the shape of the tensor.
        scale: the root mean square of `x`, or 1.0 if that is zero.
        by_entry: True if an entry moves in proportion to its own magnitude; False if in proportion to `scale`.
        places: for each direction, the position in the random table at which its numbers begin.
        along: for each direction, the inner product of its numbers with the scaled claim (each entry times its scale).
        felt: the sum of squares of the scaled claim.
        rms: the root mean square of the claim.
    """

    x: np.ndarray
    claim: np.ndarray
    shape: tuple[int, ...]
    by_entry: bool
    places: Sequence[int]
    scale: float = 1.0
    along: np.ndarray = field(default_factory=lambda: np.zeros(DIRECTIONS))
    felt: float = 0.0
    rms: float = 0.0
    noise: list[_Noise] = field(default_factory=list)

    def scales(self, part: slice) -> np.ndarray | float:
        """Return the factor by which the move of each entry in a slice is scaled."""
        return np.abs(self.x[part].astype(np.float64)) if self.by_entry else self.scale


@dataclass(frozen=True)
class Direction:
    """A direction along which one tensor moves.

    Attributes:
        share: the slope that the claim predicts along the direction.
        noises: for each gradient passed to `Claims.compare`, the inner product of its difference from the claim with
            the direction.
    """

    share: float
    noises: Sequence[float]
    _tensor: _Tensor
    _table: RandomTable
    _place: int
    _part: float
    _amplitude: float

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        return self._tensor.shape

    def move(self, step: float, out: np.ndarray) -> np.ndarray:
        """Write the tensor after a step along the direction into the float64 array `out`, and return `out`."""
        flat = out.reshape(-1)
        far = step * self._amplitude
        for part, claim in slices(self._tensor.claim):
            scales = self._tensor.scales(part)
            claim *= self._part * scales
            claim += self._table.at(self._place + part.start, claim.size)
            claim *= far * scales
            np.add(claim, self._tensor.x[part], out=flat[part])
        return out


class Claims:
    """Claimed gradients of tensors at a point, and the directions that they are checked along.

    Args:
        point: the values of the tensors.
        arrays: tensor -> its gradient, of the same shape.
        rng: draws the directions.
        by_entry: True moves each entry in proportion to its own magnitude, so that a tiny entry stays on its side of a
            kink. False moves it in proportion to the root mean square of its tensor.
    """

    def __init__(
        self, point: Mapping[str, np.ndarray], arrays: Arrays, rng: np.random.Generator, by_entry: bool = False
    ) -> None:
        self.arrays = arrays
        self._table = RandomTable(rng, max((claim.size for claim in arrays.values()), default=1))
        self._tensors: dict[str, _Tensor] = {}
        for name, claim in arrays.items():
            x, places = point[name], rng.integers(0, self._table.period, DIRECTIONS).tolist()
            tensor = _Tensor(np.ravel(x), np.ravel(claim), np.shape(x), by_entry and bool(np.any(x)), places)
            self._tensors[name] = _measured(tensor, self._table)

    def compare(self, others: Arrays) -> None:
        """Add to the noise how much other gradients differ from the claims.

        Args:
            others: gradients at a point that differs from the point of the claims by a rounding error.
        """
        for name, tensor in self._tensors.items():
            tensor.noise.append(_noise(tensor, np.ravel(others[name]), self._table))

    def size(self, name: str) -> float:
        """Return the root mean square of a tensor, or 1.0 if it is zero."""
        return self._tensors[name].scale

    def entry(self, name: str) -> float:
        """Return the typical size (root mean square) of an entry of a claim."""
        return self._tensors[name].rms

    def noise(self, name: str) -> float:
        """Return the root mean square of the noise in a claim, relative to the claim."""
        tensor = self._tensors[name]
        squares = max((noise.squares for noise in tensor.noise), default=0.0)
        return math.sqrt(squares / max(tensor.claim.size, 1)) / max(tensor.rms, 1e-300)

    def largest_noise(self, name: str) -> float:
        """Return the largest entry of the noise in a claim."""
        return max((noise.largest for noise in self._tensors[name].noise), default=0.0)

    def direction(self, name: str, number: int, amplitude: float) -> Direction:
        """Return one of a tensor's directions.

        Args:
            name: the tensor.
            number: which of the tensor's directions, modulo `DIRECTIONS`.
            amplitude: the size of a move by a step of 1, relative to the size of the tensor. A negative number gives
                the opposite direction.
        """
        tensor, number = self._tensors[name], number % DIRECTIONS
        along = float(tensor.along[number])
        part = math.copysign(UNIFORM, along) / math.sqrt(tensor.felt) if tensor.felt > 0 else 0.0
        share = amplitude * (along + part * tensor.felt)
        noises = [amplitude * (float(noise.along[number]) + part * noise.with_claim) for noise in tensor.noise]
        return Direction(share, noises, tensor, self._table, tensor.places[number], part, amplitude)


def _measured(tensor: _Tensor, table: RandomTable) -> _Tensor:
    """Compute the root mean squares and inner products of a tensor, and return it."""
    squares = claims = 0.0
    for part, claim in slices(tensor.claim):
        x = tensor.x[part].astype(np.float64)
        squares += float(x @ x)
        claims += float(claim @ claim)
        if tensor.by_entry:
            claim *= np.abs(x)
            tensor.felt += float(claim @ claim)
        tensor.along += [float(claim @ table.at(place + part.start, claim.size)) for place in tensor.places]
    count = max(tensor.claim.size, 1)
    tensor.scale = math.sqrt(squares / count) or 1.0
    tensor.rms = math.sqrt(claims / count)
    if not tensor.by_entry:
        tensor.along *= tensor.scale
        tensor.felt = claims * tensor.scale**2
    return tensor


def _noise(tensor: _Tensor, other: np.ndarray, table: RandomTable) -> _Noise:
    """Return the inner products of (other - claimed gradient) with the random directions and with the claim."""
    found = _Noise(np.zeros(DIRECTIONS), 0.0, 0.0, 0.0)
    for part, claim in slices(tensor.claim):
        apart = other[part] - claim
        found.squares += float(apart @ apart)
        found.largest = max(found.largest, float(np.max(np.abs(apart), initial=0.0)))
        scales = tensor.scales(part)
        apart *= scales
        found.along += [float(apart @ table.at(place + part.start, claim.size)) for place in tensor.places]
        claim *= scales
        found.with_claim += float(apart @ claim)
    return found
