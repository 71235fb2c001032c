"""Draw random data for a model, in sizes that it accepts and with values that are valid for each input."""

from __future__ import annotations

import base64
import itertools
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, ValueInfoProto, helper, numpy_helper

from onnxgrad_cli.common.memory import free_memory
from onnxgrad_cli.errors import unreadable
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.execution.limits import counted
from onnxgrad_cli.execution.sizes_to_try import sized, sizes_to_try, switch_values
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import refill
from onnxgrad_cli.ir.types import Arrays, Shape, dtype_of, is_float, shape_of
from onnxgrad_cli.ir.weightless_copy import copied
from onnxgrad_cli.metadata import ROLES, Role, Roles

Run = Callable[[Arrays], Arrays]
Sizes = Mapping[str, int]
Drawn = tuple[Arrays, Arrays, dict[str, int] | None]
"""The feeds of a run, its outputs, and the sizes of symbols; None instead of sizes if no feed was drawn at random."""


@dataclass(frozen=True)
class DescribedModel:
    """A training model with its weights, and the roles of its inputs and outputs.

    Attributes:
        model, roles: the model and the roles of its inputs and outputs.
        cotangents: input that is a cotangent -> the output of the original that it belongs to and whose shape it has.
        original: computes the original's outputs from feeds for this model.
        differentiated: the original's outputs that are differentiated; empty for a training model.
        stored: initializer -> its value, if it was already read. Reading it from the model again would copy it.
    """

    model: ModelProto
    roles: Roles
    cotangents: Mapping[str, str] = field(default_factory=dict)
    original: Callable[[Arrays], Arrays] | None = None
    differentiated: Collection[str] = ()
    stored: Mapping[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def of_inference(cls, model: ModelProto) -> DescribedModel:
        """Describe an inference model, with its first output in the role of the loss."""
        stored = {tensor.name for tensor in model.graph.initializer}
        inputs = {value.name: "constant" if value.name in stored else "model input" for value in model.graph.input}
        outputs = {value.name: Role("kept output") for value in model.graph.output}
        return cls(model, Roles("", (), "", inputs, {**outputs, next(iter(outputs), ""): Role("loss")}))

    @cached_property
    def types(self) -> dict[str, TypeProto]:
        """The declared types of the inputs."""
        return {value.name: value.type for value in self.model.graph.input}

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """The declared shapes of the inputs that must be fed."""
        return {name: shape_of(self.types[name]) or () for name in self.roles.fed}

    @cached_property
    def own(self) -> list[str]:
        """The inputs of the model itself that must be fed, without labels and cotangents."""
        inputs = (name for name in self.roles.fed if self.roles.inputs[name] == "model input")
        return [name for name in inputs if name not in self.cotangents]

    @cached_property
    def weights(self) -> Arrays:
        """The stored values of the tensors that have a gradient."""
        tensors = {
            tensor.name: tensor for tensor in self.model.graph.initializer if tensor.name in self.roles.gradients
        }
        read = {name: numpy_helper.to_array(tensor) for name, tensor in tensors.items() if name not in self.stored}
        return {name: read[name] if name in read else self.stored[name] for name in tensors}


DRAWN = 12
"""Bytes of memory per element while random data are drawn: a float64, and its conversion to the input's type."""


SEARCH, TRIES = 3.0, 4
"""A search for sizes ends after `SEARCH` seconds of processor time, but not before `TRIES` sizes were tried.

It begins with small sizes, at which a run fails quickly if it fails, and goes on to sizes at which a run takes seconds.
"""

DRAWS = 12
"""Number of draws of random data that a search makes at least, unless `SEARCH` ends it.

Some models run only on some values.
"""


def first_run(run: Run, described: DescribedModel, rng: np.random.Generator, data: Arrays, sizes: Sizes) -> Drawn:
    """Search for sizes and random data on which `run` succeeds, and return the feeds, outputs and sizes.

    Sizes at which a run is cheap are tried first. `run_on_drawn` draws the data for given sizes.

    Raises:
        Exception: `run` fails at all sizes. The exception of the first attempt is raised.
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
"""Ranges for random floats, tried in turn until outputs are finite. None stands for the normal distribution.

The others lie inside the domains of functions such as Log, Acosh and Atanh.
"""

MIXED = 8
"""Number of draws in which each input has its own random range, after the draws with one range for all inputs."""


def run_on_drawn(
    run: Run, described: DescribedModel, rng: np.random.Generator, data: Arrays, guess: Sizes, fixed: Sizes,
    masked: bool = True, first: Sequence[Range] = (),
) -> Drawn:  # fmt: skip
    """Draw random feeds of given sizes until results are finite; return the feeds, outputs and sizes.

    The results are the loss, or each differentiated output. If they are never finite, the second draw is returned.

    Args:
        run, described, rng, data: see `first_run`.
        guess: symbol -> its size. If a label or cotangent must have a different size, that size is used instead.
        fixed: symbol -> its size, for sizes that are never replaced.
        masked: see `random_feeds`.
        first: ranges of floats to try before `RANGES`.

    Raises:
        Exception: `run` fails on the first feeds.
    """
    find = _open_sizes(described)
    runs: list[Drawn] = []
    for ranges in _ranges(described, rng, first):
        feeds = random_feeds(described, rng, guess, masked, ranges)
        given = {name: x for name, x in data.items() if name in feeds or name in described.roles.gradients}
        feeds.update(given)
        try:
            if unmet := find(feeds, guess):
                guess = {**guess, **unmet, **fixed}
                again = random_feeds(described, rng, guess, masked, ranges)
                feeds = {**again, **{name: feeds[name] for name in described.own}, **given}
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
    """Yield (sizes, `masked`) to try, until the search takes too long; see `random_feeds` for `masked`.

    If the model compares an integer input with a stored integer, all sizes are first tried with that integer.
    """
    for masked in (True, False) if _switches(described) else (True,):
        start, tried = time.process_time(), list[dict[str, int]]()
        for found in sizes_to_try(described.shapes, described.model):
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
    """Yield maps, float input -> range: first the same range for all inputs, then a random range for each input."""
    names = [name for name in described.own if is_float(described.types[name])]
    yield from (dict.fromkeys(names, each) for each in (*first, *RANGES))
    if len(names) > 1 and described.differentiated:
        for _ in range(MIXED):
            yield {name: RANGES[rng.integers(len(RANGES))] for name in names}


def _is_defined(described: DescribedModel, feeds: Arrays, outputs: Arrays) -> bool:
    """Return True if the loss, or each differentiated output, is finite."""
    values = dict(outputs)
    if described.differentiated and described.original is not None:
        with suppress(Exception):  # the executors' exceptions share no base class
            values.update(described.original(feeds))
    names = (described.roles.loss, *described.differentiated)
    return all(finite(np.asarray(values[name])) for name in names if name in values)


def _switches(described: DescribedModel) -> dict[str, int]:
    """Return model input -> the integer that the model compares it with; labels are left out. See `switch_values`."""
    inputs = described.roles.inputs
    return {name: at for name, at in switch_values(described.model).items() if inputs.get(name) == "model input"}


def _open_sizes(described: DescribedModel) -> Callable[[Arrays, Sizes], dict[str, int]]:
    """Return a function that finds the sizes of symbols that occur only in labels or cotangents.

    The function takes feeds and sizes. It runs the original, whose outputs have the shapes of the cotangents, or the
    forward part, because a label has the sizes of the output that it is compared with. It returns those sizes that
    differ from the given ones.
    """
    own = {dim for name in described.own for dim in described.shapes[name]}
    judged = {term.label: (term.output, term.class_axis) for term in described.roles.losses}
    judged |= {name: (output, -1) for name, output in described.cotangents.items()}
    open_ = {
        name: described.shapes[name]
        for name in judged.keys() & described.shapes.keys()
        if any(isinstance(dim, str) and dim not in own for dim in described.shapes[name])
    }
    run = described.original
    if not described.cotangents:
        made = {name for node in described.model.graph.node for name in node.output}
        outputs = sorted({judged[name][0] for name in open_} & made)
        run = Executor(part(described.model, outputs), fallback=False) if outputs else None
    if run is None or not open_:
        return lambda feeds, sizes: {}

    def find(feeds: Arrays, sizes: Sizes) -> dict[str, int]:
        results, found = run(feeds), dict[str, int]()
        for name, shape in open_.items():
            output, class_axis = judged[name]
            sizes_there = list(np.shape(results[output])) if output in results else []
            if name in described.cotangents and 0 in sizes_there:
                raise ValueError(f"'{output}' is empty, so there is nothing to differentiate")
            if len(sizes_there) == len(shape) + 1:
                del sizes_there[class_axis]
            pairs = zip(shape, sizes_there, strict=False)
            found |= {dim: n for dim, n in pairs if isinstance(dim, str) and dim not in own and sizes.get(dim) != n}
        return found

    return find


def part(model: ModelProto, outputs: Iterable[str | ValueInfoProto]) -> ModelProto:
    """Return the part of a model that computes some values. A value given only by name has no declared type."""
    values = [ValueInfoProto(name=each) if isinstance(each, str) else each for each in outputs]
    part = copied(model)
    refill(part.graph.output, values)
    graph = Graph(part)
    graph.remove_unused()
    return graph.commit()


def with_proof_part(described: DescribedModel) -> ModelProto:
    """Return a training model with the nodes that only proofs need. They are stored in its metadata.

    Raises:
        OnnxgradError: the nodes can't be read.
    """
    if not described.roles.proof_part:
        return described.model
    try:
        more = GraphProto.FromString(base64.b64decode(described.roles.proof_part, validate=True))
    except (ValueError, DecodeError) as error:
        raise unreadable(f"the model's entry '{ROLES}' can't be read: {error}", "build it again") from error
    model = copied(described.model)
    model.graph.node.extend(more.node)
    model.graph.initializer.extend(more.initializer)
    return model


def loss_part(model: ModelProto, loss: str) -> ModelProto:
    """Return the part of a training model that computes the loss."""
    return part(model, [value for value in model.graph.output if value.name == loss])


def run_on_own(model: ModelProto, feeds: Arrays) -> Arrays:
    """Run a model on those feeds that belong to its inputs, and return its outputs."""
    taken = {value.name for value in model.graph.input}
    return Executor(model)({name: x for name, x in feeds.items() if name in taken})


def factors_off_zero(described: DescribedModel, rng: np.random.Generator) -> Arrays:
    """Return random values for the LoRA matrices that are initialized to zero.

    While such a matrix is zero, the gradient of the adapter's other matrix is zero too, and would not be tested.
    """
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
    """Return random arrays for the inputs that must be fed.

    - Floats are normally distributed, or uniform in the range that `ranges` gives for their input.
    - Integers that index a weight are valid indices. Other integers are 0 or 1 if `masked`, otherwise 1.
    - A single integer is 1, because it may be a step or a length. With a step of 0 in STFT, onnxruntime ends the
      process.
    - If `masked`, an integer input that the model compares with a stored integer has the value of that integer.
    - If `lengths`, an input with one integer per sample is taken as the lengths of signals, and is filled with the
      largest of the sizes. A shorter signal may be masked as a whole.
    - If a loss has an ignored label, every fifth sample has that label, and the first two samples don't.

    Raises:
        OverLimit: drawing them exceeds the limit of time or memory for runs.
        MemoryError: they would not fit into the free memory.
    """
    shapes = sized(described.shapes, sizes)
    if DRAWN * sum(map(math.prod, shapes.values())) > free_memory():  # or the system ends processes
        raise MemoryError("random data do not fit into the free memory")
    classes = {loss.label: loss.classes for loss in described.roles.losses if loss.classes}
    limits = {**index_limits(described.model, shapes, replaced=True), **classes}
    switches, full = _switches(described), lengths_in(described) if lengths else set()
    feeds = {}
    for name, shape in shapes.items():
        dtype = dtype_of(described.types[name])
        between = (ranges or {}).get(name) or (None if described.roles.inputs[name] == "model input" else RANGES[1])
        if is_float(described.types[name]) and between is not None:  # every loss is defined between 0 and 1
            uniform = np.asarray(rng.uniform(*between, shape))
            feeds[name] = uniform.astype(helper.tensor_dtype_to_np_dtype(dtype))
        else:
            least = 0 if name in limits or (masked and (shape or dtype == TensorProto.BOOL)) else 1
            feeds[name] = draw(rng, dtype, shape, least, limits.get(name, 2))
            if masked and name in switches and name not in limits:
                feeds[name] = np.full_like(feeds[name], switches[name])
            if name in full:
                feeds[name] = np.full_like(feeds[name], max(sizes.values(), default=1))
    _ignore_some(described.roles, feeds)
    return feeds


def _ignore_some(roles: Roles, feeds: Arrays) -> None:
    """Give every fifth sample the ignored label of its loss, and the first two samples another one, in place."""
    for term in roles.losses:
        if term.ignore_index is not None and term.label in feeds:
            labels = feeds[term.label].reshape(-1)
            first = labels[:2]
            first[first == term.ignore_index] = (term.ignore_index + 1) % (term.classes or 2)
            labels[4::5] = term.ignore_index


def lengths_in(described: DescribedModel) -> set[str]:
    """Return the model inputs that may hold signal lengths: one integer per sample, not used as an index."""
    shapes = {name: described.shapes[name] for name in described.own}
    vectors = (name for name, shape in shapes.items() if len(shape) == 1)
    integers = {n for n in vectors if dtype_of(described.types[n]) in (TensorProto.INT32, TensorProto.INT64)}
    return integers - index_limits(described.model, sized(shapes, {}), replaced=True).keys()


def draw(rng: np.random.Generator, dtype: int, shape: Sequence[int], low: int = 0, high: int = 2) -> np.ndarray:
    """Return a random array of any element type (a TensorProto.DataType).

    Floats, and both parts of complex numbers, are normally distributed. Integers are at least `low` and below `high`.
    Strings hold such integers as text.
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
"""Operators whose result contains only entries of the first input, so an index stays an index."""

_SAME_SHAPE = frozenset({"Cast", "Identity", "DequantizeLinear"})

_LOOKUPS = {
    "Gather": (1, 0, "axis"), "GatherElements": (1, 0, "axis"), "GatherBlockQuantized": (1, 0, "gather_axis"),
    "ScatterElements": (1, 0, "axis"),
}  # fmt: skip
"""Operator -> position of its indices, position of the table that they index, name of the attribute for the axis."""


def index_limits(model: ModelProto, shapes: Mapping[str, Sequence[int]], replaced: bool = False) -> dict[str, int]:
    """Return input -> number of rows of the tensor that its entries index, for all inputs that are indices.

    Args:
        model: the model. The shape of an indexed tensor must be known: it is an initializer, or its shape is declared.
        shapes: the shapes of inputs, in addition to those that the model declares.
        replaced: also include inputs in which a Where replaces some indices, such as those beyond the last row.
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
        indices, rows = _looked_up(node, dims)
        if indices in origin and isinstance(rows, int):
            source = origin[indices]
            limits[source] = min(limits.get(source, max(rows, 1)), max(rows, 1))
    return limits


def _looked_up(node: NodeProto, dims: Mapping[str, Sequence[int | str]]) -> tuple[str, int | str | None]:
    """Return the indices of a lookup and the number of rows of its table; "" and None for any other node."""
    if node.op_type not in _LOOKUPS:
        return "", None
    indices, table, attribute = _LOOKUPS[node.op_type]
    axis, shape = next((a.i for a in node.attribute if a.name == attribute), 0), dims.get(node.input[table], ())
    return node.input[indices], shape[axis] if -len(shape) <= axis < len(shape) else None


def finite(x: np.ndarray) -> bool:
    """Return True if every entry is a finite number."""
    if isinstance(x, list):  # a sequence, perhaps of maps
        return True
    if x.dtype.kind in "iubOU":
        return True
    return bool(np.isfinite(x if x.dtype.kind in "fc" else np.asarray(x, np.float64)).all())
