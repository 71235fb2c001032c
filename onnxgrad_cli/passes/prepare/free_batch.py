"""Free the batch of a model: make the fixed batch size, with which it was exported, dynamic (a symbol).

Exporters fix the batch size of their example unless they are given a symbol, so many files accept only one sample at a
time. In such a file, constants that depend on the batch size occur all over the graph. `Tracker` finds the axis of the
samples in each value, and ensures that samples do not mix. This module replaces the constants. For a batch, the result
computes the same as the original model does for one sample after the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from onnx import ModelProto, TensorProto, ValueInfoProto, helper, numpy_helper

from onnxgrad_cli.errors import Caution, Refusal, UnsupportedError, ambiguous, conflict, wrong_shape
from onnxgrad_cli.ir.dialects import repair
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node, make_node
from onnxgrad_cli.ir.node_values import attributes_of
from onnxgrad_cli.ir.sample_places import ONE, Edit, SampleAxis, Tracker
from onnxgrad_cli.ir.type_inference import infer_types
from onnxgrad_cli.ir.types import Dim, dtype_of, shape_of
from onnxgrad_cli.ir.weightless_copy import copied, skeleton
from onnxgrad_cli.options import ShapeOptions
from onnxgrad_cli.passes.prepare.constant_folding import fold
from onnxgrad_cli.passes.prepare.declarations import forget_placeholders, set_hints_aside
from onnxgrad_cli.passes.prepare.expand_definitions import expand
from onnxgrad_cli.passes.prepare.normalise import inline_functions, normalise
from onnxgrad_cli.passes.prepare.opset import raise_opset
from onnxgrad_cli.record import Training

HINT = "export the model with a symbolic size there: dynamic_axes, or dynamic_shapes, of torch.onnx.export"
FIRST_WITH_RANGE = 11
"""The first opset that has Range. (Mod, which is needed too, is older.)"""

ONNXRUNTIME = "com.microsoft"
"""The domain of onnxruntime's own operators, whose definitions this module expands."""

SYMBOL = "batch"
"""The default symbol of a batch size that was made dynamic."""

NOT_COMPARED = "not compared with runs of the original"
"""The start of the caution if the model with the dynamic batch size was not compared with the original one."""


class SamplesMixError(UnsupportedError):
    """The samples of a batch influence each other, so a batch gives other results than one sample after the other."""


class FixedBatch(NamedTuple):
    """A batch of fixed size, which is to be made dynamic.

    Attributes:
        axes: map from an input to its axis of samples, for the inputs whose axis is known.
        size: the fixed size in the model.
        symbol: the name of the dynamic batch size.
    """

    axes: Mapping[str, int]
    size: int
    symbol: str


class FreedBatch(NamedTuple):
    """A batch whose fixed size was replaced by a symbol.

    Attributes:
        inputs: map from each input with samples to the axis of the samples.
        outputs: map from each output that depends on samples to the position of the samples in it.
        size: the fixed size that the model had.
        symbol: the symbol that replaced it.
    """

    inputs: Mapping[str, int]
    outputs: Mapping[str, SampleAxis]
    size: int
    symbol: str

    def caution(self, compared: str) -> Caution:
        """Return a note for the user that the batch size was made dynamic.

        Args:
            compared: the result of the comparison with the original model, as a part of the sentence.
        """
        axes = " and ".join(f"axis {axis} of '{name}'" for name, axis in self.inputs.items())
        text = (
            f"the fixed batch size {self.size} ({axes}) was replaced by the symbolic size '{self.symbol}'; {compared}"
        )
        return Caution("note", next(iter(self.inputs)), text)


def fixed_batch(model: ModelProto) -> FixedBatch | None:
    """Return the batch if the first axis of all inputs (except scalars) has the same fixed size; otherwise None."""
    stored = {tensor.name for tensor in model.graph.initializer}
    shapes = {v.name: shape_of(v.type) for v in model.graph.input if v.name not in stored}
    leading = {name: shape[0] for name, shape in shapes.items() if shape}
    sizes = set(leading.values())
    size = next(iter(sizes)) if len(sizes) == 1 else None
    return FixedBatch(dict.fromkeys(leading, 0), size, _symbol(model)) if isinstance(size, int) and size else None


def _symbol(model: ModelProto) -> str:
    values = (*model.graph.input, *model.graph.output, *model.graph.value_info)
    taken = {dim for value in values for dim in shape_of(value.type) or ()}
    return next(name for name in (SYMBOL, *(f"{SYMBOL}_{i}" for i in range(1, len(taken) + 2))) if name not in taken)


def asked_batch(model: ModelProto, options: ShapeOptions) -> FixedBatch | None:
    """Return the batch to which the option `shapes` gives a symbol or a different size than the model has, or None.

    Raises:
        UsageError: `shapes` contradicts other sizes of the model.
    """
    declared = {value.name: shape_of(value.type) for value in model.graph.input}
    axes: dict[str, int] = {}
    pairs = set[tuple[int, int | str]]()
    for name, shape in options.shapes.items():
        old = declared.get(name)
        if old is None or len(old) != len(shape):
            continue
        changed = [axis for axis, size in enumerate(old) if isinstance(size, int) and size != shape[axis]]
        if not changed:
            continue
        others = [axis for axis in changed if axis != changed[0] or not _may_be_freed(old[axis], shape[axis], axis)]
        if others:
            axis = others[0]
            raise wrong_shape(
                f"`shapes`: axis {axis} of '{name}' has size {old[axis]} in the model, but {shape[axis]} is given",
                "keep the sizes that the model has, except on the batch axis: only this axis can change",
            )
        if shape.count(shape[changed[0]]) > 1 and not isinstance(shape[changed[0]], int):
            raise ambiguous(
                f"`shapes`: '{name}' has '{shape[changed[0]]}' on two axes", "give the batch a name of its own"
            )
        axes[name] = changed[0]
        pairs.add((int(old[changed[0]]), shape[changed[0]]))
    if not axes:
        return None
    if len(pairs) > 1:
        said = " and ".join(f"from {old} to {new}" for old, new in sorted(pairs, key=str))
        raise conflict(
            f"`shapes`: all inputs must have the same batch size, but the given shapes change it {said}",
            "give the batch axis the same name in all shapes",
        )
    ((size, new),) = pairs
    return FixedBatch(axes, size, new if isinstance(new, str) and new != "?" else _symbol(model))


def _may_be_freed(size: Dim, asked: Dim, axis: int) -> bool:
    """Return True if the user may change the size of an axis from `size` to `asked`. Other changes may be mistakes.

    A size of 0 can't be changed, and none can be changed to 0. Any other size can become a symbol. It can become a
    different number if the axis is the first, or if the size is 1.
    """
    return size != 0 and asked != 0 and (isinstance(asked, str) or axis == 0 or size == 1)


def free_batch(graph: Graph, batch: FixedBatch, shapes: Mapping[str, object] | None = None) -> FreedBatch:
    """Make the fixed batch size of a model dynamic, in place.

    Args:
        graph: the model as it was read.
        batch: the fixed batch. An input that is not in `batch.axes` gets an axis of samples too if the graph is
            consistent with that.
        shapes: map whose keys are the inputs whose shapes the user chose. Those that are not in `batch.axes` have no
            samples.

    Raises:
        SamplesMixError: an operator mixes samples.
        UnsupportedError: an operator that reads samples is not supported.
    """
    inline_functions(graph)
    graph.remove_unused()  # unused nodes are not analysed, and could not run
    work, sizes = _analysed(graph, batch.size)
    starts = _possible_axes(graph, batch, shapes or {})
    tracker = Tracker(work, batch.size, starts, frees=True)
    tracker.run(work.output_names, HINT)
    what = " and ".join(f"axis {axis} of '{name}'" for name, axis in batch.axes.items())
    failed = f"the batch size {batch.size} ({what}) can't be made symbolic:"
    if tracker.refusals:
        raise (SamplesMixError if tracker.mixes else UnsupportedError)(failed, tracker.refusals, HINT)
    inputs = {name: tracker.places[name].axis for name in starts if name in tracker.places}
    refusals = _Rewriter(graph, work, tracker, batch.size, next(iter(inputs.items()))).run(sizes)
    if refusals:
        raise UnsupportedError(failed, refusals, HINT)
    proto = graph.proto.graph
    for value in (*proto.input, *proto.output, *proto.value_info):
        if value.name in tracker.places:
            _declare(value, tracker.places[value.name], batch.symbol)
    graph.commit()
    outputs = {name: tracker.places[name] for name in graph.output_names if name in tracker.places}
    return FreedBatch(inputs, outputs, batch.size, batch.symbol)


def _possible_axes(graph: Graph, batch: FixedBatch, shapes: Mapping[str, object]) -> dict[str, list[SampleAxis | None]]:
    """Return input -> its possible axes of samples; see `Tracker`. The arguments are those of `free_batch`."""
    found: dict[str, list[SampleAxis | None]] = {name: [SampleAxis(axis)] for name, axis in batch.axes.items()}
    for value in graph.proto.graph.input:
        shape = shape_of(value.type) or ()
        if value.name not in {*graph.initializers, *found, *shapes}:
            possible: list[SampleAxis | None] = [SampleAxis(at) for at, size in enumerate(shape) if size == batch.size]
            if possible and (len(shape) == 1 or shape[0] != batch.size):  # it may be a setting without samples
                possible.append(None)
            found |= {value.name: possible} if possible else {}
    return found


def _analysed(graph: Graph, size: int) -> tuple[Graph, list[Node]]:
    """Return a copy of a graph for the analysis, and the Shape and Size nodes of the copy before folding.

    In the copy, all types are inferred, and values computed from known sizes are folded into constants.
    """
    whole = graph.commit()
    work = Graph(skeleton(whole) if size == 1 else copied(whole), graph.path)
    repair(work.commit())
    work.read_again()
    if whole.ir_version < 4:
        work.unlist_initializers()
    forget_placeholders(work)
    normalise(work)
    set_hints_aside(work)
    infer_types(work)
    sizes = [node for node in work.nodes if node.op_type in ("Shape", "Size")]
    if any(node.domain == ONNXRUNTIME for node in work.nodes):  # written by onnxruntime's optimizer
        raise_opset(work, Training())
        infer_types(work)
        while expand(work, ONNXRUNTIME):
            infer_types(work)
    while fold(work):
        infer_types(work)
    return work, sizes


def _declare(value: ValueInfoProto, place: SampleAxis, symbol: str) -> None:
    dims = value.type.tensor_type.shape.dim
    if not dims and place.axis == 0 and value.type.tensor_type.HasField("shape"):
        dims.add()  # the value had no axes
    if place.axis < len(dims):
        dims[place.axis].Clear()
        if place.is_plain:
            dims[place.axis].dim_param = symbol


class _Rewriter:
    """Replaces the constants of a graph that depend on its batch size."""

    def __init__(self, graph: Graph, work: Graph, tracker: Tracker, batch: int, source: tuple[str, int]) -> None:
        self.graph, self.work, self.places, self.edits = graph, work, tracker.places, tracker.edits
        self.batch, self.source = batch, source
        self.first: list[Node] = []
        self.before: dict[int, list[Node]] = {}
        self._written: dict[object, str] = {}
        self.refusals: list[Refusal] = []

    def run(self, sizes: Sequence[Node]) -> list[Refusal]:
        """Rewrite the graph. Return refusals of nodes for which this failed; if there are any, discard the graph."""
        made = {node.output[0]: node for node in self.graph.nodes if node.output}
        op_types = {node.output[0]: node.op_type for node in self.work.nodes if node.output}
        replaced: dict[int, list[Node]] = {}
        for node in sizes:
            if node.input[0] in self.places:
                original = self._find(made, node.output[0], node.op_type)
                if original is not None:
                    replaced[id(original)] = self._fixed_sizes(original)
        for edit in (edit for edits in self.edits.values() for edit in edits):
            original = self._find(made, edit.node, op_types[edit.node])
            if original is not None:
                getattr(self, f"_{edit.kind}")(original, edit)
        nodes = []
        for node in self.graph.nodes:
            nodes += [*self.before.get(id(node), ()), *replaced.get(id(node), [node])]
        self.graph.set_nodes([*self.first, *nodes])
        return self.refusals

    def _find(self, made: Mapping[str, Node], output: str, op_type: str) -> Node | None:
        node = made.get(output)
        if node is None or node.op_type != op_type:
            self.refusals.append(Refusal(output, op_type, "it is part of another node in the file", HINT))
            return None
        return node

    def _refuse(self, node: Node, why: str) -> None:
        self.refusals.append(Refusal(node.name or node.output[0], node.op_type, why, HINT))

    # -- writing nodes --------------------------------------------------------------------------------------------

    def _emit(self, nodes: list[Node], op_type: str, inputs: Sequence[str], stem: str, **attributes: object) -> str:
        name = self.graph.fresh(stem)
        nodes.append(make_node(op_type, inputs, [name], self.graph.fresh(f"{name}_node"), **attributes))
        return name

    def constant(self, values: Any, dtype: type[np.generic] = np.int64) -> str:
        """Write a constant and return its name."""
        array: np.ndarray = np.asarray(values, dtype)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._written:
            value = numpy_helper.from_array(array)
            self._written[key] = self._emit(self.first, "Constant", [], "batch_constant", value=value)
        return self._written[key]

    @cached_property
    def size(self) -> str:
        """The name of the batch size, a vector with one entry."""
        name, axis = self.source
        shape = self._emit(self.first, "Shape", [name], f"{name}_shape")
        return self._emit(self.first, "Gather", [shape, self.constant([axis])], "batch_size")

    def ones_and_size(self, length: int, index: int) -> str:
        """Write a vector of `length` ones, except that the entry at `index` is the batch size."""
        key = ("vector", length, index)
        if key not in self._written:
            parts = [self.constant([1] * index)] * bool(index) + [self.size]
            parts += [self.constant([1] * (length - index - 1))] * (length - index > 1)
            stem = "batch_repeats"
            self._written[key] = self._emit(self.first, "Concat", parts, stem, axis=0) if length > 1 else self.size
        return self._written[key]

    # -- edits ----------------------------------------------------------------------------------------------------

    def _repeat(self, node: Node, edit: Edit) -> None:
        name, place = node.input[edit.position], edit.place
        assert place is not None
        key = (name, place)
        if key not in self._written:
            shape = shape_of(self.work.types.get(name)) or ()
            nodes = self.before.setdefault(id(node), [])
            found, axis = name, place.axis
            if self.batch != 1:
                found = self._emit(nodes, "Gather", [found, self.constant([0])], f"{name}_first", axis=axis)
            if place.before != ONE:
                parts = [*shape[:axis], place.before.number, place.after.number, *shape[axis + 1 :]]
                found = self._emit(nodes, "Reshape", [found, self.constant(parts)], f"{name}_parts")
                repeats = self.ones_and_size(len(shape) + 1, axis + 1)
                found = self._emit(nodes, "Tile", [found, repeats], f"{name}_repeated")
                whole = self.constant([*shape[:axis], -1, *shape[axis + 1 :]])
                found = self._emit(nodes, "Reshape", [found, whole], f"{name}_each")
            else:  # a Tile has a longer gradient than an Expand
                repeats = self.ones_and_size(len(shape), axis)
                found = self._emit(nodes, "Expand" if place.is_plain else "Tile", [found, repeats], f"{name}_each")
            self._written[key] = found
        node.input[edit.position] = self._written[key]

    def _multiply(self, node: Node, edit: Edit) -> None:
        if len(node.input) <= edit.position:
            return self._refuse(node, "its shape is an attribute")
        name, known = node.input[edit.position], self.work.constant(node.input[edit.position])
        target = None if known is None else known.tolist()
        shape = shape_of(self.work.types.get(name))
        if target is not None and node.op_type == "Reshape":
            found = self._free_target(node, edit, target)
            if found is not None:
                node.input[edit.position] = self.constant(found)
                return
        if shape is None or not isinstance(shape[0], int):
            return self._refuse(node, "the length of its shape is unknown")
        nodes = self.before.setdefault(id(node), [])
        if target is not None:
            name = self.constant(target)
        name = self._emit(nodes, "Mul", [name, self.ones_and_size(shape[0], edit.entry)], f"{name}_each")
        if self.batch != 1:
            divisor = [self.batch if i == edit.entry else 1 for i in range(shape[0])]
            name = self._emit(nodes, "Div", [name, self.constant(divisor)], f"{name}_size")
        node.input[edit.position] = name

    def _free_target(self, node: Node, edit: Edit, target: list[int]) -> list[int] | None:
        """Return the target shape of a Reshape with 0 or -1 for the batch, or None if that is impossible.

        A 0 in `target` copies the size of the input's axis at the same position. If the batch moves to another axis,
        such entries are replaced by numbers.
        """
        index, place, source = edit.entry, edit.place, edit.value
        result = shape_of(self.work.types.get(node.output[0])) or ()
        zero_copies = not attributes_of(node).get("allowzero")
        for i, entry in enumerate(target):
            moved = (i == index) != (i == source.axis) or (i == index and place != source)
            if entry == 0 and zero_copies and moved:
                size = result[i]
                if not isinstance(size, int):
                    self._refuse(node, "its shape copies a size that is unknown")
                    return target
                target[i] = size
        if target[index] == -1 or (target[index] == 0 and zero_copies):
            return target
        if zero_copies and place == source:
            return [0 if i == index else entry for i, entry in enumerate(target)]
        pairs = zip(target, result, strict=True)
        target = [size if entry == -1 and isinstance(size, int) else entry for entry, size in pairs]
        if -1 not in target:
            return [-1 if i == index else entry for i, entry in enumerate(target)]
        return None

    def _reshape(self, node: Node, edit: Edit) -> None:
        """Replace a Squeeze, Unsqueeze or Gather of the only sample by a Reshape that keeps all samples."""
        sizes = shape_of(self.work.types.get(node.output[0])) or ()
        others = [size for axis, size in enumerate(sizes) if axis != edit.entry]
        if not all(isinstance(size, int) for size in others):
            return self._refuse(node, "it moves the batch axis of a value that has other sizes that may vary")
        target = self.constant([-1 if axis == edit.entry else size for axis, size in enumerate(sizes)] or [-1])
        node.op_type, node.input = "Reshape", [node.input[0], target]
        del node.attribute[:]

    def _set(self, node: Node, edit: Edit) -> None:
        if len(node.input) <= edit.position:
            return self._refuse(node, "the ends of its slices are attributes")
        name = node.input[edit.position]
        known, shape, dtype = self.work.constant(name), shape_of(self.work.types.get(name)), self._dtype(name)
        value = min(edit.value, np.iinfo(dtype).max)
        if known is not None:
            entries = known.tolist()
            if entries[edit.entry] != value:
                entries[edit.entry] = value
                node.input[edit.position] = self.constant(entries, dtype)
            return
        if shape is None or not isinstance(shape[0], int):
            return self._refuse(node, "the length of its shape is unknown")
        here = self.constant([i == edit.entry for i in range(shape[0])], np.bool_)
        nodes = self.before.setdefault(id(node), [])
        inputs = [here, self.constant([value], dtype), name]
        node.input[edit.position] = self._emit(nodes, "Where", inputs, f"{name}_each")

    def _dtype(self, name: str) -> type[np.signedinteger[Any]]:
        return np.int32 if dtype_of(self.work.types.get(name)) == TensorProto.INT32 else np.int64

    def _axes(self, node: Node, edit: Edit) -> None:
        if (self.graph.opset() or 13) < 13:
            node.attribute.append(helper.make_attribute("axes", edit.value))
        else:
            node.input[1:] = [self.constant(edit.value)]

    def _own(self, node: Node, edit: Edit) -> None:
        """Shift the indices of each sample to its part of the axis. Within a part, all samples have equal indices."""
        place, name = edit.place, node.input[edit.position]
        shape = shape_of(self.work.types.get(name))
        assert place is not None and shape is not None
        if (self.graph.opset() or 0) < FIRST_WITH_RANGE:
            return self._refuse(node, f"its indices need opset {FIRST_WITH_RANGE} or newer")
        nodes = self.before.setdefault(id(node), [])
        if self._dtype(name) == np.int32:
            name = self._emit(nodes, "Cast", [name], f"{name}_wide", to=TensorProto.INT64)
        length = self.constant([1])
        if place.after != ONE:
            sizes = self._emit(nodes, "Shape", [node.input[0]], f"{node.input[0]}_shape")
            size = self._emit(nodes, "Gather", [sizes, self.constant([place.axis])], f"{node.input[0]}_size")
            length = self._emit(nodes, "Div", [size, self.size], f"{node.input[0]}_length")
        rank = len(shape)
        numbers = self.constant([-1 if axis == edit.entry else 1 for axis in range(rank)])
        starts = self._emit(nodes, "Reshape", [self._numbers, numbers], f"{name}_sample")
        starts = self._emit(nodes, "Mul", [starts, length], f"{name}_start")
        if node.op_type == "GatherND":
            depth = int(shape[-1])
            here = self.constant([int(axis == place.axis) for axis in range(depth)])
            others = self.constant([int(axis != place.axis) for axis in range(depth)])
            starts = self._emit(nodes, "Mul", [starts, here], f"{name}_start")
            name = self._emit(nodes, "Mul", [name, others], f"{name}_inner")
        else:
            name = self._emit(nodes, "Mod", [name, length], f"{name}_inner")
        node.input[edit.position] = self._emit(nodes, "Add", [name, starts], f"{name}_each")

    @cached_property
    def _numbers(self) -> str:
        """The name of a vector that numbers the samples: 0, 1, ..."""
        zero, one = self.constant(0), self.constant(1)
        count = self._emit(self.first, "ReduceSum", [self.size], "batch_count", keepdims=0)
        return self._emit(self.first, "Range", [zero, count, one], "batch_numbers")

    def _fixed_sizes(self, node: Node) -> list[Node]:
        """Replace a Shape or Size by nodes with the sizes of the fixed batch, so that later results don't change."""
        name, given = node.input[0], attributes_of(node)
        shape = list(shape_of(self.work.types.get(name)) or ())
        place = self.places[name]
        whole = range(len(shape))[given.get("start", 0) : given.get("end", len(shape))]
        sizes = shape if node.op_type == "Size" else [shape[i] for i in whole]
        if all(isinstance(size, int) for size in sizes):
            value = np.array(math.prod(sizes) if node.op_type == "Size" else sizes, np.int64)
            return [make_node("Constant", [], node.output, node.name, value=numpy_helper.from_array(value))]
        if node.op_type == "Size":
            self._refuse(node, "it counts the elements of all samples")
            return [node]
        if place.axis not in whole:
            return [node]
        size = shape[place.axis]
        if not isinstance(size, int):
            self._refuse(node, "it reads the batch size and another size as one number")
            return [node]
        here = self.constant([i == place.axis for i in whole], np.bool_)
        output = node.output[0]
        node.output = [self.graph.fresh(f"{output}_run")]
        fixed = make_node("Where", [here, self.constant([size]), node.output[0]], [output], f"{node.name}_fixed")
        return [node, fixed]
