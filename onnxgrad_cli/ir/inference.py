"""The types of a graph's values: onnx infers them, on the model without its weights; here is what it does not know.

Some operators it types not at all, or as in one run of a loop; and its symbols count anew at each inference, so they
get names of ours, lest two sizes should share one.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

import onnx
from onnx import GraphProto, ModelProto, TensorProto, TypeProto

from onnxgrad_cli.errors import OnnxgradError, Unknown
from onnxgrad_cli.ir.domains import is_standard, plain_domain
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.iterations import first_elements, fixed_trips, meet, of_any_element, stacked, with_fresh
from onnxgrad_cli.ir.node import Node, as_message
from onnxgrad_cli.ir.nodes import attributes_of, body_of, captured_by, dims_in, reads, subgraphs, with_bodies
from onnxgrad_cli.ir.onnx_inference import OutOfProportion, infer_shapes
from onnxgrad_cli.ir.operator_types import Types, operator_types
from onnxgrad_cli.ir.shape_values import ShapeValues, better, computed_shape
from onnxgrad_cli.ir.types import Dim, Shape, dtype_of, shape_of, tensor_type, without_shape

LIKE_INPUT = frozenset({"Gradient", "GroupNormalization", "Inverse"})
"""Operators for which onnx infers no type; each output has that of the input at its place."""

OTHERWISE = LIKE_INPUT | {"PRelu"}
"""Operators that stand in other terms where onnx infers; see `_in_known_terms`."""


class Contradiction(OnnxgradError):
    """The shapes in a graph contradict each other: a node's inputs don't fit its operator."""


def infer_types(graph: Graph) -> None:
    """Infer the type of every value, on the skeleton, and keep what is found in `graph.types`.

    Raises:
        Contradiction: a node's inputs don't fit its operator.
    """
    bare = _in_known_terms(graph.skeleton())
    alike: dict[tuple[int, ...], TypeProto] = {}
    for name, tensor in graph.initializers.items():
        key = (tensor.data_type, *tensor.dims)
        if key not in alike:
            alike[key] = graph.shared(tensor_type(tensor.data_type, key[1:]))
        graph.types[name] = alike[key]
    for value in bare.graph.input:  # an unnamed size gets its symbol first, so that it is known again wherever it goes
        graph.named(value.type)
    stated: set[str] = set()
    for name in graph.assumed:  # what is taken from hints stays told apart from what is inferred
        graph.types.pop(name, None)
    graph.assumed.clear()
    while True:
        symbols = {dim.dim_param: dim.dim_param for dim in dims_in(bare.graph)}
        inferred, error = _inferred(bare, graph)
        _adopt_types(graph, inferred.graph, symbols)
        more = _beyond_onnx(graph, stated)  # what follows a value without a type is a contradiction to onnx
        if not more and error and graph.assumed:
            graph.hints.clear()
            return infer_types(graph)
        if not more and error:
            raise Contradiction(f"the model's shapes contradict each other: {str(error).strip()}") from error
        if not more:
            break
        stated.update(more)
        for value in bare.graph.output:
            if value.name in more:
                value.type.CopyFrom(more.pop(value.name))
        bare.graph.value_info.extend(itertools.starmap(onnx.helper.make_value_info, more.items()))


def _in_known_terms(bare: ModelProto) -> ModelProto:
    """The skeleton with an Identity for each output of the operators in `LIKE_INPUT`, so that onnx infers its type, and
    with a Mul in place of each PRelu.

    To onnx what a PRelu makes has the shape of x; onnxruntime makes 3 of an axis of size 1 where the slope has 3, as in
    a Mul, and whether an axis with a symbol has size 1 is known at run time alone.
    """
    broadcasts = any(is_standard(entry.domain) and entry.version >= 7 for entry in bare.opset_import)
    for node in with_bodies(bare.graph.node) if broadcasts else ():
        if node.op_type == "PRelu" and is_standard(node.domain):
            node.op_type = "Mul"
    if any(node.op_type in LIKE_INPUT for node in bare.graph.node):
        nodes = list(bare.graph.node)
        del bare.graph.node[:]
        for node in nodes:
            if node.op_type in LIKE_INPUT:
                pairs = [pair for pair in zip(node.input, node.output, strict=False) if all(pair)]
                bare.graph.node.extend(onnx.helper.make_node("Identity", [x], [y]) for x, y in pairs)
            else:
                bare.graph.node.append(node)
    return bare


def _adopt_types(graph: Graph, found: GraphProto, symbols: dict[str, str]) -> None:
    """Keep the types that onnx has inferred, under symbols of ours.

    Args:
        graph: gets the types.
        found: the graph with the declarations that onnx has inferred.
        symbols: symbols of `found` -> ours; those that onnx has made up are added.
    """
    as_it_is: dict[bytes, TypeProto] = {}  # types whose sizes have no other names with us
    for value in (*found.output, *found.input, *found.value_info):
        if value.name in graph.initializers:
            continue
        given = value.type.SerializeToString()
        value_type = as_it_is.get(given)
        if value_type is None:
            value_type = graph.shared(graph.named(value.type, symbols))
            if value_type.SerializeToString() == given:
                as_it_is[given] = value_type
        graph.types[value.name] = value_type


def declare(graph: Graph) -> None:
    """Write into the model the types whose shape would not be inferred from it again."""
    if graph.declared_shapes.isdisjoint(graph.made()):
        return
    again = _inferred(graph.skeleton(), graph)[0].graph
    found = {v.name for v in (*again.input, *again.output, *again.value_info) if shape_of(v.type) is not None}
    lost = [name for node in graph.nodes for name in node.output if name and name not in found]
    types = {name: graph.types[name] for name in lost if shape_of(graph.types.get(name)) is not None}
    values = graph.proto.graph.value_info
    kept = [value for value in values if value.name not in types]
    if types:
        del values[:]
        values.extend(kept)
        values.extend(itertools.starmap(onnx.helper.make_value_info, types.items()))


def _inferred(bare: ModelProto, graph: Graph) -> tuple[ModelProto, Exception | None]:
    """The model with what types can be inferred, and what contradicts, if anything does."""
    try:
        found = follow_shapes(graph, bare, strict=True)
    except onnx.shape_inference.InferenceError:
        found = None  # data propagation takes some float vectors for shapes, and then refuses valid models
    if found is not None:
        return found, None
    try:
        return infer_shapes(bare, strict_mode=True), None
    except onnx.shape_inference.InferenceError as error:
        contradiction = error
    try:
        return infer_shapes(bare), contradiction
    except onnx.shape_inference.InferenceError:  # of what it can't read at all, it infers nothing
        return bare, contradiction


def follow_shapes(graph: Graph, bare: ModelProto, strict: bool = False) -> ModelProto | None:
    """The model with the types that onnx infers where it follows the integers that make shapes.

    Args:
        graph: the graph; it is not asked again where it once filled the memory.
        bare: its skeleton.
        strict: whether contradictions are errors.

    Returns:
        The model; None where those integers fill the memory: a vector that Concat doubles forty times has 2^40.

    Raises:
        onnx.shape_inference.InferenceError: the model contradicts itself.
    """
    if not graph.follows_shapes:
        return None
    try:
        return infer_shapes(bare, strict_mode=strict, data_prop=True)
    except OutOfProportion:
        graph.follows_shapes = False
        return None


def _beyond_onnx(graph: Graph, stated: set[str]) -> Types:
    """Types that onnx does not infer, or not as well, and that have not been `stated` before.

    What follows from one of them is inferred node by node, as far as that goes. What is left, of nodes that read, at
    whatever distance, a value of which the type is found here, waits until onnx has inferred again.
    """
    more = _Beyond(graph)
    found: Types = {}
    waiting: set[str] = set()
    changed: set[str] = set()
    for node in graph.nodes:
        read = reads(node) if waiting or changed else ()
        if waiting and not waiting.isdisjoint(read):
            waiting.update(node.output)
            continue
        if changed and not changed.isdisjoint(read):
            again = _typed_again(graph, node)
            if again is None:
                waiting.update(node.output)
                continue
            changed.update(again)
            graph.types.update(again)
        new = {name: t for name, t in more.types(node).items() if name and name not in stated}
        found |= new
        changed |= new.keys()
        graph.types.update(new)
    return found


def _typed_again(graph: Graph, node: Node) -> Types | None:
    """The types of a node's outputs that are other ones now; None where the node alone does not tell."""
    schema = schema_of(graph, node)
    if schema is None or subgraphs(node) or node.op_type in OTHERWISE:
        return None
    types = {name: graph.types[name] for name in node.input if name in graph.types}
    data = {name: graph.initializers[name] for name in types if graph.constant(name) is not None}
    imports = list(graph.proto.opset_import)
    try:
        found = onnx.shape_inference.infer_node_outputs(schema, as_message(node), types, data, opset_imports=imports)
    except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError, KeyError):
        return None
    pairs = ((name, graph.types.get(name), value_type) for name, value_type in found.items())
    again = {name: _finer(graph, before, now) for name, before, now in pairs}
    return {name: value_type for name, value_type in again.items() if value_type != graph.types.get(name)}


def schema_of(graph: Graph, node: Node) -> onnx.defs.OpSchema | None:
    """The schema of a node's operator; None where onnx knows none."""
    try:
        return onnx.defs.get_schema(node.op_type, graph.opset(node.domain) or 1, plain_domain(node.domain))
    except onnx.defs.SchemaError:
        return None


def _finer(graph: Graph, before: TypeProto | None, now: TypeProto) -> TypeProto:
    """The type that a value has now, where unnamed sizes keep the symbols that they had before."""
    old, new = shape_of(before), shape_of(now)
    if old is None or new is None or len(old) != len(new):
        return before if before is not None and new is None else graph.named(now)
    sizes = [a if b == "?" or isinstance(a, int) else b for a, b in zip(old, new, strict=True)]
    return tensor_type(dtype_of(now), sizes)


class _Beyond:
    """The types of values where onnx infers none, or not as well.

    They follow from the operator, from what is known of computed shapes, or, where nothing else is known, from what the
    model stores. Of that, a rank of 0, but of a sum and the like, or a size of 1 is what stands where nothing was
    known, or what was 1 when the model was exported: it says nothing.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.makers = graph.producers()
        self.values = ShapeValues(graph, self.makers)
        self._shapes: dict[int, tuple[TypeProto | None, Shape | None, bool]] = {}
        inputs = (shape_of(graph.types.get(name)) or () for name in graph.input_names)
        self.borne = set[Dim](itertools.chain.from_iterable(inputs))
        self.outputs = {*graph.output_names} if graph.hints else set()
        stored = (shape_of(hint.type) or () for name, hint in graph.hints.items() if name in self.outputs)
        count = Counter(itertools.chain.from_iterable(stored))
        self.names = {symbol for symbol in count if count[symbol] == 1}  # of outputs: they stand for nothing else

    def types(self, node: Node) -> Types:
        """The types of a node's outputs, where they are known here alone."""
        if node.op_type == "Loop" and all(name in self.graph.types for name in reads(node)):
            return dict(zip(node.output, loop_types(self.graph, node)[1], strict=False))
        found = operator_types(self.graph, node, self.makers)
        if found:
            return found
        outputs = node.output[:]
        name = outputs[0] if outputs else ""
        shape, is_plain = self._shape(self.graph.types.get(name))
        if not is_plain:
            sizes = better(self.values, shape, computed_shape(self.values, node), self.borne)
            if sizes is not None and (dtype := self._dtype(node)):
                return {name: self.graph.named(tensor_type(dtype, sizes))}
        if not self.graph.hints and not self.graph.observed:
            return {}
        observed = self._observed(node) if self.graph.observed else {}
        hinted = {name: self._hinted(name) for name in outputs if name in self.graph.hints}
        if not observed and not hinted:
            return {}
        trusted = {name: value_type for name, value_type in hinted.items() if value_type is not None}
        trusted = {name: value_type for name, value_type in trusted.items() if name not in observed}
        self.graph.assumed.update(trusted)
        self.graph.declared_shapes.update((*trusted, *observed))
        return trusted | observed

    def _shape(self, value_type: TypeProto | None) -> tuple[Shape | None, bool]:
        """The shape in a type, and whether each size is a number or means something; read once, as many share one."""
        found = self._shapes.get(id(value_type))
        if found is None:
            shape = shape_of(value_type)
            plain = shape is not None and not any(isinstance(size, str) and size not in self.borne for size in shape)
            found = self._shapes[id(value_type)] = (value_type, shape, plain)  # with the type, so that its id stays
        return found[1:]

    def _observed(self, node: Node) -> Types:
        """The types of a node's outputs that only a run has told."""
        graph = self.graph
        seen = {name: graph.observed[name] for name in node.output if name in graph.observed}
        lost = {name: value_type for name, value_type in seen.items() if shape_of(graph.types.get(name)) is None}
        return {n: graph.named(tensor_type(dtype_of(t), shape_of(t))) for n, t in lost.items()}

    def _dtype(self, node: Node) -> int:
        """The element type of the first output of a node whose shape was computed."""
        known = dtype_of(self.graph.types.get(node.output[0]))
        return known or (dtype_of(self.graph.types.get(node.input[0])) if node.op_type != "ConstantOfShape" else 0)

    def _hinted(self, name: str) -> TypeProto | None:
        """What the model stores of a value, where inference finds nothing: of an output, that may be a single size."""
        hint, inferred = self.graph.hints[name].type, self.graph.types.get(name)
        known, said = shape_of(inferred), self._said(name, hint)
        if known is None and said:
            return self.graph.named(tensor_type(dtype_of(inferred) or dtype_of(hint), said))
        if known is None:
            return hint if self._is_all_there_is(name, hint, inferred) else None
        if name not in self.outputs or len(said) != len(known):
            return None
        pairs = zip(known, said, strict=True)
        wider = [a if b is None or isinstance(a, int) or a in self.borne else b for a, b in pairs]
        return None if wider == list(known) else tensor_type(dtype_of(inferred), wider)

    def _said(self, name: str, hint: TypeProto) -> list[Dim | None]:
        """The sizes that the model stores of a value; None for those that say nothing."""
        meaning = self.borne | self.names if name in self.outputs else self.borne
        return [s if s in meaning or (isinstance(s, int) and s != 1) else None for s in shape_of(hint) or ()]

    def _is_all_there_is(self, name: str, hint: TypeProto, inferred: TypeProto | None) -> bool:
        """Whether to believe what is stored without sizes: of the sum of everything, or of what has no other type."""
        if shape_of(hint) is None:
            return inferred is None
        return self.makers[name].op_type.startswith("Reduce")


def inside(graph: Graph, body: GraphProto, types: Sequence[TypeProto]) -> Graph:
    """A body, typed, as a graph whose inputs have `types`, and what it captures the types it has outside.

    Raises:
        Unknown: the type of a captured value is unknown.
    """
    model = ModelProto(ir_version=graph.proto.ir_version, graph=body)
    model.opset_import.extend(graph.proto.opset_import)
    model.functions.extend(graph.proto.functions)
    for value, value_type in zip(model.graph.input, types, strict=True):
        value.type.CopyFrom(value_type)
    for value in model.graph.output:
        value.type.CopyFrom(without_shape(value.type))
    inner = Graph(model)
    inner.share_names(graph)
    for name in dict.fromkeys(captured_by(body)):
        if name not in graph.types:
            raise Unknown(f"the type of '{name}' is unknown")
        if graph.constant(name) is not None:
            inner.initializers[name] = graph.initializers[name]
        else:
            inner.add_input(name, graph.types[name])
    infer_types(inner)
    return inner


def input_types(graph: Graph, node: Node) -> list[TypeProto]:
    """The types of the inputs of a node's bodies; those of an If have none.

    Raises:
        Unknown: the type of an input of the node, or of a captured value, is unknown.
    """
    if node.op_type == "Loop":
        return loop_types(graph, node)[0]
    if node.op_type == "If":
        return []
    if node.op_type != "Scan":
        raise Unknown(f"the types in the body of a {node.op_type} are unknown")
    given = attributes_of(node)
    types = _known_types(graph, node.input)
    sliced = given["num_scan_inputs"]
    axes = given.get("scan_input_axes") or [0] * sliced
    states = len(types) - sliced
    return types[:states] + [_slice(t, axis) for t, axis in zip(types[states:], axes, strict=True)]


def _slice(value_type: TypeProto, axis: int) -> TypeProto:
    """The type of a slice along `axis`."""
    shape = shape_of(value_type)
    kept = None if shape is None else [size for at, size in enumerate(shape) if at != axis % len(shape)]
    return tensor_type(dtype_of(value_type), kept)


def loop_types(graph: Graph, node: Node) -> tuple[list[TypeProto], list[TypeProto]]:
    """The types of the inputs of a Loop's body, and of the Loop's outputs.

    A dimension of a state that an iteration provably keeps is the same in all of them; one that it may change gets a
    symbol of its own. (onnx gives the states of a Loop no shape at all.)

    Raises:
        Unknown: the type of an initial value or of a captured one is unknown.
    """
    body = body_of(node, "body")
    states = _known_types(graph, node.input[2:])
    first = first_elements(graph, node, body)
    counters = [tensor_type(TensorProto.INT64, []), tensor_type(TensorProto.BOOL, [])]
    varying: set[str] = set()
    while True:
        inner = inside(graph, body, [*counters, *states])
        after = [inner.types.get(value.name, TypeProto()) for value in body.output]
        merged = [meet(graph, *pair, varying) for pair in zip(states, after[1:], strict=False)]
        for j, name in enumerate(first):
            if name in inner.types:  # onnx takes an empty sequence for one of elements without a shape
                merged[j] = of_any_element(onnx.helper.make_sequence_type_proto(inner.types[name]))
        first = [None] * len(first)
        if merged == states:
            break
        states = merged
    trips = fixed_trips(graph, node, inner)
    length = graph.fresh_symbol() if trips is None else trips
    final = [
        of_any_element(now) if now.HasField("sequence_type") else with_fresh(graph, before, varying)
        for before, now in zip(states, after[1:], strict=False)
    ]
    rows = [stacked(value_type, length) for value_type in after[1 + len(states) :]]
    return [*counters, *states], [*final, *rows]


def _known_types(graph: Graph, names: Iterable[str]) -> list[TypeProto]:
    """The types of values; raises Unknown for the first that has none."""
    types = []
    for name in names:
        if name not in graph.types:
            raise Unknown(f"the type of '{name}' is unknown")
        types.append(graph.types[name])
    return types
