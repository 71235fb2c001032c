"""Data for a model that brings none: of sizes it accepts, and valid as what each input is."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnxgrad_cli.common.memory import free_memory
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.execution.limits import counted
from onnxgrad_cli.execution.sizes import sized, sizes_to_try, switch_values
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.skeleton import copied
from onnxgrad_cli.ir.types import Arrays, Shape, dtype_of, is_float, shape_of
from onnxgrad_cli.metadata import Roles


@dataclass(frozen=True)
class DescribedModel:
    """A training model with its weights, and what its inputs and outputs are for.

    Attributes:
        model, roles: the model and the roles of what goes in and out.
        cotangents: inputs that have the shape of an output of the original -> that output.
        original: computes the original's outputs from feeds for this model.
        differentiated: the original's outputs that are differentiated; empty in a training model.
        stored: values of initializers, as far as they were read: each look into the model would copy them.
    """

    model: ModelProto
    roles: Roles
    cotangents: Mapping[str, str] = field(default_factory=dict)
    original: Callable[[Arrays], Arrays] | None = None
    differentiated: Collection[str] = ()
    stored: Mapping[str, np.ndarray] = field(default_factory=dict)

    @cached_property
    def weights(self) -> Arrays:
        """The stored values of what has a gradient."""
        tensors = {
            tensor.name: tensor for tensor in self.model.graph.initializer if tensor.name in self.roles.gradients
        }
        read = {name: numpy_helper.to_array(tensor) for name, tensor in tensors.items() if name not in self.stored}
        return {name: read[name] if name in read else self.stored[name] for name in tensors}


DRAWN = 12
"""Bytes that a number takes while it is drawn: a float64, and what is made of it."""


SEARCH, TRIES = 3.0, 4
"""Seconds of the processor after which a search for sizes that fit ends, and how many it tries all the same: it begins
with small ones, on which a run fails in no time, and goes on to those on which each takes seconds."""

DRAWS = 12
"""How often data are drawn at least, for a model that runs on some values only."""


def first_run(
    run: Callable[[Arrays], Arrays],
    described: DescribedModel,
    rng: np.random.Generator,
    data: Mapping[str, np.ndarray],
    sizes: Mapping[str, int],
) -> tuple[Arrays, Arrays, dict[str, int] | None]:
    """Feeds that `run` accepts, its outputs for them, and the sizes if any feed was drawn at random.

    Cheap sizes come first; for the data of one size see `run_on_drawn`.

    Raises:
        Exception: what `run` raised at the first sizes, where it accepts none.
    """
    failure: Exception | None = None
    for guess, masked in _guesses(described, sizes):
        try:
            return run_on_drawn(run, described, rng, data, guess, sizes, masked)
        except Exception as error:  # sizes or numbers that don't fit: try others
            failure = failure or error
    assert failure is not None
    raise failure


Range = tuple[float, float]

RANGES: tuple[Range | None, ...] = (None, (0.05, 0.95), (1.05, 2.95), (-0.95, 0.95))
"""Ranges of floats in which functions have values: those of normal numbers (None), Log, Acosh and Atanh."""

MIXED = 8
"""Draws in which each input has a range of its own."""


def run_on_drawn(
    run: Callable[[Arrays], Arrays],
    described: DescribedModel,
    rng: np.random.Generator,
    data: Mapping[str, np.ndarray],
    guess: Mapping[str, int],
    fixed: Mapping[str, int],
    masked: bool = True,
    first: Sequence[Range] = (),
) -> tuple[Arrays, Arrays, dict[str, int] | None]:
    """Draw feeds of some sizes that `run` accepts; return them, its outputs, and the sizes if any feed was drawn.

    Draws vary until the loss, or what is differentiated, is finite; the second draw serves if it never is.

    Args:
        run, described, rng, data: see `first_run`.
        guess: the sizes.
        fixed: those of `guess` that outputs of other sizes don't change.
        masked: see `random_feeds`.
        first: ranges of floats that come before `RANGES`.

    Raises:
        Exception: `run` does not accept the first feeds.
    """
    open_sizes = (_sizes_of_labels(described), _sizes_of_cotangents(described))
    runs: list[tuple[Arrays, Arrays, dict[str, int] | None]] = []
    for ranges in _ranges(described, rng, first):
        feeds = random_feeds(described, rng, guess, masked, ranges)
        given = {name: x for name, x in data.items() if name in feeds or name in described.roles.gradients}
        feeds.update(given)
        try:
            unmet = {dim: size for find in open_sizes for dim, size in find(feeds, guess).items()}
            if unmet:
                guess = {**guess, **unmet, **fixed}
                again = random_feeds(described, rng, guess, masked, ranges)
                feeds = {**again, **_inputs(described, feeds), **given}
            outputs = run(feeds)
        except Exception:
            if not runs:
                raise
            break
        runs.append((feeds, outputs, dict(guess) if any(name not in data for name in feeds) else None))
        if _is_defined(described, feeds, outputs):
            return runs[-1]
    return runs[min(1, len(runs) - 1)]


def _guesses(described: DescribedModel, sizes: Mapping[str, int]) -> Iterator[tuple[dict[str, int], bool]]:
    """Yield sizes to try with a value of `masked` to try at them, until the search takes too long.

    The integers that select a branch come at all sizes before others do.
    """
    for masked in (True, False) if _switches(described) else (True,):
        start, tried = time.process_time(), list[dict[str, int]]()
        for found in sizes_to_try(_shapes(described), described.model):
            if len(tried) >= TRIES and time.process_time() - start > SEARCH:
                break
            guess = {**found, **sizes}
            if guess not in tried:
                tried.append(guess)
                yield guess, masked
        for guess in itertools.islice(itertools.cycle(tried), max(DRAWS - len(tried), 0)):
            if time.process_time() - start <= SEARCH:
                yield guess, masked


def _ranges(
    described: DescribedModel, rng: np.random.Generator, first: Sequence[Range]
) -> Iterator[Mapping[str, Range | None]]:
    """Yield ranges for the inputs of floats: one for all, then one for each."""
    types = {value.name: value.type for value in described.model.graph.input}
    own = (name for name in described.roles.fed if described.roles.inputs[name] == "model input")
    names = [name for name in own if is_float(types[name]) and name not in described.cotangents]
    yield from (dict.fromkeys(names, each) for each in (*first, *RANGES))
    if len(names) > 1 and described.differentiated:
        for _ in range(MIXED):
            yield {name: RANGES[rng.integers(len(RANGES))] for name in names}


def _is_defined(described: DescribedModel, feeds: Arrays, outputs: Arrays) -> bool:
    """Return True if the loss, or all that is differentiated, is finite."""
    values = dict(outputs)
    if described.differentiated and described.original is not None:
        with suppress(Exception):  # the executors' exceptions share no base class
            values.update(described.original(feeds))
    names = (described.roles.loss, *described.differentiated)
    return all(finite(np.asarray(values[name])) for name in names if name in values)


def _shapes(described: DescribedModel) -> dict[str, Shape]:
    """The declared shapes of the inputs that must be fed."""
    types = {value.name: value.type for value in described.model.graph.input}
    return {name: shape_of(types[name]) or () for name in described.roles.fed}


def _switches(described: DescribedModel) -> dict[str, int]:
    """Return the integers that inputs of the model, not labels, are compared with; see `switch_values`."""
    inputs = described.roles.inputs
    return {name: at for name, at in switch_values(described.model).items() if inputs.get(name) == "model input"}


def _inputs(described: DescribedModel, feeds: Arrays) -> Arrays:
    """Of feeds those for the model's own inputs."""
    own = (name for name in feeds if described.roles.inputs[name] == "model input")
    return {name: feeds[name] for name in own if name not in described.cotangents}


def _sizes_of_cotangents(described: DescribedModel) -> Callable[[Arrays, Mapping[str, int]], dict[str, int]]:
    """A function of feeds and sizes that finds those of symbols that only cotangents have: outputs have them."""
    shapes = {name: shape for name, shape in _shapes(described).items() if name in described.cotangents}
    own = {dim for name, shape in _shapes(described).items() if name not in shapes for dim in shape}
    open_ = {name: shape for name, shape in shapes.items() if any(isinstance(d, str) and d not in own for d in shape)}
    original = described.original
    if not open_ or original is None:
        return lambda feeds, sizes: {}

    def find(feeds: Arrays, sizes: Mapping[str, int]) -> dict[str, int]:
        results = original(feeds)
        empty = [output for name in open_ if not np.size(results.get(output := described.cotangents[name], 0))]
        if empty:
            raise ValueError(f"'{empty[0]}' is empty, so nothing is differentiated")
        found = {
            dim: size
            for name, shape in open_.items()
            if (output := described.cotangents[name]) in results
            for dim, size in zip(shape, np.shape(results[output]), strict=False)
            if isinstance(dim, str) and dim not in own
        }
        return {dim: size for dim, size in found.items() if sizes.get(dim) != size}

    return find


def _sizes_of_labels(described: DescribedModel) -> Callable[[Arrays, Mapping[str, int]], dict[str, int]]:
    """A function of feeds and sizes that finds those of symbols that only labels have: what is judged has them.

    It runs the forward part, where there are such symbols and the shape of what is judged is open.
    """
    roles, shapes = described.roles, _shapes(described)
    own = {
        dim for name in shapes if roles.inputs[name] == "model input" for dim in shapes[name] if isinstance(dim, str)
    }
    open_ = {
        term.label: term
        for term in roles.losses
        if term.label in shapes and not own.issuperset(dim for dim in shapes[term.label] if isinstance(dim, str))
    }
    made = {name for node in described.model.graph.node for name in node.output}
    judged = sorted({term.output for term in open_.values()} & made)
    if not judged:
        return lambda feeds, sizes: {}
    forward = copied(described.model)
    del forward.graph.output[:]
    forward.graph.output.extend(onnx.ValueInfoProto(name=name) for name in judged)
    run = Executor(part(forward), fallback=False)

    def find(feeds: Arrays, sizes: Mapping[str, int]) -> dict[str, int]:
        results = run(feeds)
        found: dict[str, int] = {}
        for label, term in open_.items():
            sizes_there = list(results[term.output].shape)
            if len(sizes_there) == len(shapes[label]) + 1:
                del sizes_there[term.class_axis]
            for dim, size in zip(shapes[label], sizes_there, strict=False):
                if isinstance(dim, str) and dim not in own and sizes.get(dim) != size:
                    found[dim] = size
        return found

    return find


def part(model: ModelProto, output: str | None = None) -> ModelProto:
    """The part of a model that computes one output (None: its outputs)."""
    part = copied(model)
    kept = [value for value in part.graph.output if output in (None, value.name)]
    del part.graph.output[:]
    part.graph.output.extend(kept)
    graph = Graph(part)
    graph.remove_unused()
    return graph.commit()


def factors_off_zero(described: DescribedModel, rng: np.random.Generator) -> Arrays:
    """Values for the factors of adapters that begin at zero, where the gradient of the other factor is zero."""
    stored = {tensor.name: tensor for tensor in described.model.graph.initializer}
    begun = [stored[adapter.b] for adapter in described.roles.adapters]
    return {tensor.name: draw(rng, tensor.data_type, tensor.dims) for tensor in begun}


@counted()
def random_feeds(
    described: DescribedModel,
    rng: np.random.Generator,
    sizes: Mapping[str, int],
    masked: bool = True,
    ranges: Mapping[str, Range | None] | None = None,
    lengths: bool = False,
) -> Arrays:
    """Random arrays for the inputs that must be fed.

    Floats are normal, or uniform in the range that `ranges` gives their input. Integers are valid as what they index;
    those that index no weight are 0 or 1 if `masked`, else 1; so is a number alone, for it may be a step or a length:
    of a step of 0 in STFT onnxruntime ends the process. One that the model compares with a stored integer is that one,
    if `masked`. With `lengths`, one integer per sample is the largest of the sizes, as the length of a signal, because
    a shorter signal may be masked as a whole. Of labels that may say that a sample does not count, the first two count,
    and of many each fifth does not.

    Raises:
        OverLimit: they take more time or memory than runs may that nobody has asked for.
        MemoryError: they would not fit into the memory that is free.
    """
    types = {value.name: value.type for value in described.model.graph.input}
    shapes = sized(_shapes(described), sizes)
    if DRAWN * sum(map(math.prod, shapes.values())) > free_memory():  # which the system would tell by ending processes
        raise MemoryError("random data do not fit into the memory that is free")
    classes = {loss.label: loss.classes for loss in described.roles.losses if loss.classes}
    limits = {**index_limits(described.model, shapes, replaced=True), **classes}
    switches, full = _switches(described), lengths_in(described) if lengths else set()
    feeds = {}
    for name, shape in shapes.items():
        dtype = dtype_of(types[name])
        between = (ranges or {}).get(name) or (None if described.roles.inputs[name] == "model input" else RANGES[1])
        if is_float(types[name]) and between is not None:  # every loss is defined between 0 and 1
            uniform = np.asarray(rng.uniform(*between, shape))
            feeds[name] = uniform.astype(helper.tensor_dtype_to_np_dtype(dtype))
        else:
            least = 0 if name in limits or (masked and (shape or dtype == TensorProto.BOOL)) else 1
            feeds[name] = draw(rng, dtype, shape, least, limits.get(name, 2))
            if masked and name in switches and name not in limits:
                feeds[name] = np.full_like(feeds[name], switches[name])
            if name in full:
                feeds[name] = np.full_like(feeds[name], max(sizes.values(), default=1))
    for term in described.roles.losses:
        if term.ignore_index is not None and term.label in feeds:
            labels = feeds[term.label].reshape(-1)
            first = labels[:2]
            first[first == term.ignore_index] = (term.ignore_index + 1) % (term.classes or 2)
            labels[4::5] = term.ignore_index
    return feeds


def lengths_in(described: DescribedModel) -> set[str]:
    """Return the inputs of the model that have one integer per sample, which indexes nothing."""
    types = {value.name: value.type for value in described.model.graph.input}
    shapes = {
        name: shape for name, shape in _shapes(described).items() if described.roles.inputs[name] == "model input"
    }
    integers = {
        n for n, x in shapes.items() if len(x) == 1 and dtype_of(types[n]) in (TensorProto.INT32, TensorProto.INT64)
    }
    return integers - index_limits(described.model, sized(shapes, {}), replaced=True).keys()


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


_SAME_ENTRIES = frozenset(
    ("Cast", "Identity", "Reshape", "Unsqueeze", "Squeeze", "Transpose", "Flatten", "Expand", "Slice", "Tile")
)
"""Operators whose results have entries of their first input alone."""

_SAME_SHAPE = frozenset({"Cast", "Identity", "DequantizeLinear"})

_LOOKUPS = {
    "Gather": (1, 0, "axis"), "GatherElements": (1, 0, "axis"), "GatherBlockQuantized": (1, 0, "gather_axis"),
    "ScatterElements": (1, 0, "axis"),
}  # fmt: skip
"""Operator -> the positions of indices and of the table, and the attribute that names the axis of its rows."""


def index_limits(model: ModelProto, shapes: Mapping[str, Sequence[int]], replaced: bool = False) -> dict[str, int]:
    """Return the number of rows of the tensor that an input indexes, for such inputs.

    Args:
        model: the model; the tensor is a weight, or its shape is declared.
        shapes: more shapes, of inputs.
        replaced: include inputs of which some indices are replaced by a Where, as those beyond the last row may be.
    """
    dims: dict[str, Sequence[int | str]] = {v.name: shape_of(v.type) or () for v in model.graph.value_info}
    dims |= {**shapes, **{tensor.name: list(tensor.dims) for tensor in model.graph.initializer}}
    origin = {value.name: value.name for value in model.graph.input}
    limits: dict[str, int] = {}
    for node in model.graph.node:
        first = node.input[0] if node.input else ""
        if node.op_type in _SAME_ENTRIES and first in origin:
            origin[node.output[0]] = origin[first]
        if replaced and node.op_type == "Where" and not origin.keys().isdisjoint(node.input[1:]):
            origin[node.output[0]] = next(origin[name] for name in node.input[1:] if name in origin)
        if node.op_type in _SAME_SHAPE and first in dims:
            dims[node.output[0]] = dims[first]
        if node.op_type in _LOOKUPS:
            indices, table, attribute = _LOOKUPS[node.op_type]
            source, shape = origin.get(node.input[indices]), dims.get(node.input[table], ())
            axis = next((a.i for a in node.attribute if a.name == attribute), 0)
            rows = shape[axis] if -len(shape) <= axis < len(shape) else None
            if source is not None and isinstance(rows, int):
                limits[source] = min(limits.get(source, max(rows, 1)), max(rows, 1))
    return limits


def finite(x: np.ndarray) -> bool:
    """Whether every entry is a finite number."""
    if isinstance(x, list):  # a sequence, of maps it may be
        return True
    if x.dtype.kind in "iubOU":
        return True
    return bool(np.isfinite(x if x.dtype.kind in "fc" else np.asarray(x, np.float64)).all())
