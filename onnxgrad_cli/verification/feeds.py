"""Data for a model that brings none: of sizes it accepts, and valid as what each input is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, TensorProto, helper

from onnxgrad_cli.ir.types import Arrays, dtype_of, is_float, shape_of
from onnxgrad_cli.metadata import Roles

SEQUENCE_SIZES = (8, 16, 32, 64, 224)
"""Sizes that are tried, in order, for symbols that do not lead an input."""


@dataclass(frozen=True)
class DescribedModel:
    """A training model with its weights, and what its inputs and outputs are for."""

    model: ModelProto
    roles: Roles


def first_run(
    run: Callable[[Arrays], Arrays],
    described: DescribedModel,
    rng: np.random.Generator,
    data: Mapping[str, np.ndarray],
    sizes: Mapping[str, int],
) -> tuple[Arrays, Arrays, dict[str, int] | None]:
    """Feeds that `run` accepts, its outputs for them, and the sizes if any feed was drawn at random.

    Small sizes come first, and where the loss is not finite, data above zero after others.

    Raises:
        Exception: what `run` raised at the first sizes, where it accepts none.
    """
    failure: Exception | None = None
    for size in SEQUENCE_SIZES:
        for positive in (False, True):
            guess = {**_guess(described, size), **sizes}
            feeds = random_feeds(described, rng, guess, positive)
            drawn = guess if any(name not in data for name in feeds) else None
            feeds.update({name: x for name, x in data.items() if name in feeds or name in described.roles.gradients})
            try:
                outputs = run(feeds)
            except Exception as error:  # sizes that don't fit: try larger ones
                failure = failure or error
                break
            if positive or finite(outputs.get(described.roles.loss, np.zeros(1))):
                return feeds, outputs, drawn
    assert failure is not None
    raise failure


def factors_off_zero(described: DescribedModel, rng: np.random.Generator) -> Arrays:
    """Values for the factors of adapters that begin at zero, where the gradient of the other factor is zero."""
    stored = {tensor.name: tensor for tensor in described.model.graph.initializer}
    begun = [stored[adapter.b] for adapter in described.roles.adapters]
    return {tensor.name: draw(rng, tensor.data_type, tensor.dims) for tensor in begun}


def _guess(described: DescribedModel, size: int) -> dict[str, int]:
    """A size for every symbol of the inputs: 2 for what leads an input, `size` for the rest."""
    guess: dict[str, int] = {}
    types = {value.name: value.type for value in described.model.graph.input}
    for name in described.roles.fed:
        for axis, dim in enumerate(shape_of(types[name]) or ()):
            if isinstance(dim, str):
                guess.setdefault(dim, 2 if axis == 0 else size)
    return guess


def random_feeds(
    described: DescribedModel,
    rng: np.random.Generator,
    sizes: Mapping[str, int],
    positive: bool = False,
    masked: bool = True,
) -> Arrays:
    """Random arrays for the inputs that must be fed.

    Floats are normal, or between 0 and 1 if `positive`. Integers are valid as what they index; those that index
    no weight are 0 or 1 if `masked`, else 1. Of labels that may say that a sample does not count, the first one counts.
    """
    types = {value.name: value.type for value in described.model.graph.input}
    shapes = {
        name: [sizes.get(dim, 2) if isinstance(dim, str) else dim for dim in shape_of(types[name]) or ()]
        for name in described.roles.fed
    }
    classes = {loss.label: loss.classes for loss in described.roles.losses if loss.classes}
    limits = {**index_limits(described.model, shapes), **classes}
    feeds = {}
    for name, shape in shapes.items():
        dtype = dtype_of(types[name])
        if is_float(types[name]) and (positive or described.roles.inputs[name] != "model input"):
            between = np.asarray(rng.uniform(0.05, 0.95, shape))  # every loss is defined between 0 and 1
            feeds[name] = between.astype(helper.tensor_dtype_to_np_dtype(dtype))
        else:
            feeds[name] = draw(rng, dtype, shape, 0 if masked or name in limits else 1, limits.get(name, 2))
    for term in described.roles.losses:
        if term.ignore_index is not None and term.label in feeds:
            first = feeds[term.label].reshape(-1)[:1]
            first[first == term.ignore_index] = (term.ignore_index + 1) % (term.classes or 2)
    return feeds


def draw(rng: np.random.Generator, dtype: int, shape: Sequence[int], low: int = 0, high: int = 2) -> np.ndarray:
    """A random array of any element type (a TensorProto.DataType).

    Floats are normal, complex numbers in both parts; integers are at least `low` and below `high`, and so are the
    numbers that strings hold.
    """
    kind = TensorProto.DataType.Name(dtype)
    array: np.ndarray
    if "INT" in kind or kind in ("BOOL", "STRING"):
        array = np.asarray(rng.integers(low, high, shape))
    elif kind.startswith("COMPLEX"):
        array = rng.standard_normal(shape) + 1j * rng.standard_normal(shape)
    else:
        array = np.asarray(rng.standard_normal(shape))
    if dtype == TensorProto.STRING:
        array = array.astype(str)
    if dtype == TensorProto.FLOAT8E8M0:  # powers of two: it has no sign
        array = np.abs(array)
    return np.asarray(array).astype(helper.tensor_dtype_to_np_dtype(dtype))


def index_limits(model: ModelProto, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """For inputs that index a weight, or an input of one of `shapes`: how many rows that has."""
    dims = {**shapes, **{tensor.name: list(tensor.dims) for tensor in model.graph.initializer}}
    limits: dict[str, int] = {}
    for node in model.graph.node:
        if node.op_type in ("Gather", "GatherElements") and node.input[0] in dims:
            axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
            rows = max(dims[node.input[0]][axis], 1)
            limits[node.input[1]] = min(limits.get(node.input[1], rows), rows)
    return limits


def finite(x: np.ndarray) -> bool:
    """Whether every entry is a finite number."""
    return x.dtype.kind in "iub" or bool(np.isfinite(np.asarray(x, np.float64)).all())
