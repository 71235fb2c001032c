"""Adapters that were read for the products of a model, brought together: one for each matrix."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.metadata import Adapter
from onnxgrad_cli.training.adapters.places import Place, flat

Read = tuple[Place, Adapter, dict[str, np.ndarray]]
"""An adapter as a file has it for a place, and its factors by name."""


def together(found: Iterable[Read], known: Iterable[Place]) -> tuple[list[Adapter], dict[str, np.ndarray]]:
    """One adapter for each matrix, and the factors of all.

    Args:
        found: what was read.
        known: all places of the model.

    Raises:
        OnnxgradError: modules that share a matrix have other adapters, or a factor is not finite.
    """
    found = list(found)
    read = {(place.weight, place.module) for place, *_ in found}
    for place in known:
        if any(place.weight == weight for weight, _ in read) and (place.weight, place.module) not in read:
            raise _parted(next(module for weight, module in read if weight == place.weight), place)
    adapters: dict[str, tuple[str, Adapter]] = {}
    values: dict[str, np.ndarray] = {}
    for place, adapter, factors in found:
        if not all(np.isfinite(array).all() for array in factors.values()):
            raise OnnxgradError(f"the adapter of '{place.module or place.weight}' holds numbers that are not finite")
        both = (factors[adapter.a], factors[adapter.b])
        if (a := min(both, key=lambda array: array.size)).shape[:2] == (adapter.rank, adapter.rank):
            raise OnnxgradError(
                f"the adapter of '{place.module or place.weight}' is of rank {adapter.rank}, and the matrix of "
                f"{list(a.shape)}: it is no low-rank adapter",
            )
        module, other = adapters.setdefault(place.weight, (place.module, adapter))
        if other is not adapter and not _same(other, adapter, values, factors):
            raise _parted(module, place)
        values.update(factors)
    return [adapter for _, adapter in adapters.values()], values


def _parted(module: str, place: Place) -> OnnxgradError:
    return OnnxgradError(
        f"'{module}' and '{place.module}' share the matrix '{place.weight}' in this model, and have other adapters",
        "export the model anew so that each has a matrix of its own",
    )


def _same(one: Adapter, other: Adapter, values: dict[str, np.ndarray], factors: dict[str, np.ndarray]) -> bool:
    """Whether two adapters of a matrix add the same to it, but for what scaling one factor or the other rounds."""
    if bool(one.magnitude) != bool(other.magnitude):
        return False
    if one.magnitude and not np.array_equal(values[one.magnitude], factors[other.magnitude]):
        return False
    left, right = _on_vectors(one, values), _on_vectors(other, factors)
    return left.shape == right.shape and bool(np.abs(left - right).max() <= 1e-5 * np.abs(left).max())


def _on_vectors(adapter: Adapter, values: dict[str, np.ndarray]) -> np.ndarray:
    """What the product of an adapter's factors makes of a few vectors."""
    a, b = (flat(values[name]).astype(np.float64) for name in (adapter.a, adapter.b))
    left, right = (a, b) if a.shape[1] == adapter.rank == b.shape[0] else (b, a)
    return adapter.scale * (left @ (right @ np.random.default_rng(0).standard_normal((right.shape[1], 4))))
