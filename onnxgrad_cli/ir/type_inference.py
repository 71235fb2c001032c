"""Infer the types of a graph's values. onnx infers most types from the model without its weights, this module the rest.

onnx infers no types for some operators, and infers the types of a loop as if it ran once. onnx numbers its new symbols
from the start at each inference. They are renamed here, so that two different sizes never share a symbol.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Sequence

import onnx
from onnx import GraphProto, ModelProto, TensorProto, TypeProto

from onnxgrad_cli.errors import OnnxgradError, Unknown
from onnxgrad_cli.ir.domains import ML, is_standard, plain_domain
from onnxgrad_cli.ir.einsum import einsum_shape
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.iterations import first_elements, fixed_trips, meet, of_any_element, stacked, with_fresh
from onnxgrad_cli.ir.node import Node, as_message, refill
from onnxgrad_cli.ir.node_values import (
    attributes_of,
    body_of,
    captured_by,
    dims_in,
    reads,
    schema_of,
    subgraphs,
    with_bodies,
)
from onnxgrad_cli.ir.onnx_inference import OutOfProportion, infer_shapes
from onnxgrad_cli.ir.operand_sizes import first_misfit
from onnxgrad_cli.ir.shape_values import ShapeValues, better, computed_shape
from onnxgrad_cli.ir.types import Dim, Shape, dtype_of, shape_of, tensor_type, without_shape

LIKE_INPUT = frozenset({"Gradient", "GroupNormalization", "Inverse"})
"""Operators for which onnx infers no type. Each output has the type of the input at the same position."""

OTHERWISE = LIKE_INPUT | {"PRelu"}
"""Operators that `_in_known_terms` replaces by others before onnx infers types."""


LIKE_ROWS = frozenset({"Normalizer", "Scaler"})
SCORES = LIKE_ROWS | {"LinearRegressor", "SVMRegressor", "TreeEnsembleRegressor"}
"""Operators of ai.onnx.ml that return one float32 row per sample and for which onnx infers no type.

The results of those in `LIKE_ROWS` have the shape of the input.
"""

REDUCTIONS = frozenset(f"Reduce{kind}" for kind in "L1 L2 LogSum LogSumExp Max Mean Min Prod Sum SumSquare".split())

Types = dict[str, TypeProto]


class Contradiction(OnnxgradError):
    """The types in a graph contradict each other: a node's inputs don't fit its operator."""


def infer_types(graph: Graph) -> None:
    """Infer the type of every value of a graph, and store the types in `graph.types`.

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
    for value in bare.graph.input:  # unnamed sizes get symbols first, so that inference can track them
        graph.named(value.type)
    stated: set[str] = set()
    for name in graph.assumed:  # types that an earlier inference took from hints
        graph.types.pop(name, None)
    graph.assumed.clear()
    while True:
        symbols = {dim.dim_param: dim.dim_param for dim in dims_in(bare.graph)}
        inferred, error = _inferred(bare, graph)
        _adopt_types(graph, inferred.graph, symbols)
        more = _beyond_onnx(graph, stated)  # onnx reports a contradiction after a value without a type
        if not more:
            fault = _first_fault(error) if error else first_misfit(graph)
            if fault and graph.assumed:
                graph.hints.clear()
                return infer_types(graph)
            if fault:
                what = f"the model's shapes or types contradict each other: {fault}"
                raise Contradiction(what, "export it again") from error
            break
        stated.update(more)
        for value in bare.graph.output:
            if value.name in more:
                value.type.CopyFrom(more.pop(value.name))
        bare.graph.value_info.extend(itertools.starmap(onnx.helper.make_value_info, more.items()))


_KIND = r"(?:\[\w+\] )?"
_NODE_FAULT = re.compile(rf"{_KIND}(?:Inference error\(s\): )?\(op_type:(\w+), node name: (.*?)\): {_KIND}(.*)")


def _first_fault(error: Exception) -> str:
    """Return the first fault in an error of onnx's shape inference, which also lists the faults that follow from it."""
    text = " ".join(str(error).replace("\\n", "\n").split("\n")[0].split())
    found = _NODE_FAULT.match(text)
    return f"node '{found[2]}' ({found[1]}): {found[3]}" if found else text


def _in_known_terms(bare: ModelProto) -> ModelProto:
    """Replace operators whose types onnx does not infer by operators with the same result types.

    Each output of an operator in `LIKE_INPUT` becomes an Identity. A PRelu becomes a Mul, because onnx gives its result
    the shape of x, but onnxruntime broadcasts as in a Mul: an axis of size 1 gets size 3 if the slope has size 3. An
    axis with a symbol may also turn out to have size 1 at run time.

    Args:
        bare: the model without its weights, which is changed in place and returned.
    """
    broadcasts = any(is_standard(entry.domain) and entry.version >= 7 for entry in bare.opset_import)
    for node in with_bodies(bare.graph.node) if broadcasts else ():
        if node.op_type == "PRelu" and is_standard(node.domain):
            node.op_type = "Mul"
    if any(node.op_type in LIKE_INPUT for node in bare.graph.node):
        nodes: list[onnx.NodeProto] = []
        for node in bare.graph.node:
            pairs = zip(node.input, node.output, strict=False)
            views = (onnx.helper.make_node("Identity", [x], [y]) for x, y in pairs if x and y)
            nodes += views if node.op_type in LIKE_INPUT else [node]
        refill(bare.graph.node, nodes)
    return bare


def _adopt_types(graph: Graph, found: GraphProto, symbols: dict[str, str]) -> None:
    """Store the types that onnx has inferred in the graph, with the symbols of the graph.

    Args:
        graph: the graph that gets the types.
        found: the graph with the types that onnx has inferred.
        symbols: symbol in `found` -> symbol of the graph. Symbols that onnx has introduced are added.
    """
    as_it_is: dict[bytes, TypeProto] = {}  # types whose symbols need no renaming
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
    """Declare in the model the types of values whose shapes can't be inferred from the model itself."""
    if graph.declared_shapes.isdisjoint(graph.made()):
        return
    again = _inferred(graph.skeleton(), graph)[0].graph
    found = {v.name for v in (*again.input, *again.output, *again.value_info) if shape_of(v.type) is not None}
    lost = [name for node in graph.nodes for name in node.output if name and name not in found]
    types = {name: graph.types[name] for name in lost if graph.shape(name) is not None}
    values = graph.proto.graph.value_info
    if types:
        kept = (value for value in values if value.name not in types)
        refill(values, [*kept, *itertools.starmap(onnx.helper.make_value_info, types.items())])


def _inferred(bare: ModelProto, graph: Graph, check_type: bool = True) -> tuple[ModelProto, Exception | None]:
    """Return the model with the inferred types. Also return the contradiction that onnx reports, or None."""
    try:
        found = follow_shapes(graph, bare, strict=True, check_type=check_type)
    except onnx.shape_inference.InferenceError:
        found = None  # data propagation treats some float vectors as shapes and then refuses valid models
    if found is not None:
        return found, None
    try:
        return infer_shapes(bare, check_type=check_type, strict_mode=True), None
    except onnx.shape_inference.InferenceError as error:
        contradiction = error
    if check_type and _is_tolerated(graph, str(contradiction)):
        return _inferred(bare, graph, check_type=False)
    try:
        return infer_shapes(bare), contradiction
    except onnx.shape_inference.InferenceError:  # onnx can't read the model at all
        return bare, contradiction


_LACKED = re.compile(r".*\(op_type:(\w+), .*typestr: (\w+), has unsupported type: tensor\((double|b?float16)\)")


def _is_tolerated(graph: Graph, error: str) -> bool:
    """Return True if an error about element types does not make the model invalid.

    It may be in the function by which onnx defines an operator: some functions, as of MeanVarianceNormalization, mix
    doubles and floats. Or an operator accepts float32, but not the other floats of its operand. No runtime has a kernel
    for that, but a definition may replace the operator, such as a RotaryEmbedding of doubles.
    """
    found = _LACKED.match(error)
    schema = schema_of(found[1], graph.opset() or 1) if found else None
    if schema is None or found is None:
        return error.count("(op_type:") > 1
    kinds = {kind.type_param_str: kind.allowed_type_strs for kind in schema.type_constraints}
    return "tensor(float)" in kinds.get(found[2], ())


def follow_shapes(graph: Graph, bare: ModelProto, strict: bool = False, check_type: bool = False) -> ModelProto | None:
    """Infer the types of a model with onnx's data propagation, which tracks the integers that shapes are computed from.

    Args:
        graph: the graph of the model. Data propagation is not used again for a graph for which it needed too much
            memory.
        bare: the model without weights.
        strict: True if contradictions are errors.
        check_type: True if element types that an operator does not accept are errors.

    Returns:
        The model with types, or None if data propagation needs too much memory: a vector that Concat doubles forty
        times has 2^40 elements.

    Raises:
        onnx.shape_inference.InferenceError: the model contradicts itself.
    """
    if not graph.follows_shapes:
        return None
    try:
        return infer_shapes(bare, check_type=check_type, strict_mode=strict, data_prop=True)
    except OutOfProportion:
        graph.follows_shapes = False
        return None


def _beyond_onnx(graph: Graph, stated: set[str]) -> Types:
    """Find types that onnx does not infer, or infers less precisely. Values in `stated` are left out.

    Types that follow from a new type are inferred node by node as far as possible. Other nodes that depend on a value
    with a new type, directly or indirectly, wait until onnx has inferred types again.
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
    """Infer the types of a node's outputs again from its inputs, and return the types that changed.

    Return None if they can't be inferred from the node alone.
    """
    schema = schema_of(node.op_type, graph.opset(node.domain) or 1, node.domain)
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


def _finer(graph: Graph, before: TypeProto | None, now: TypeProto) -> TypeProto:
    """Return the new type of a value. A size that is unknown and unnamed in `now` keeps its symbol in `before`."""
    old, new = shape_of(before), shape_of(now)
    if old is None or new is None or len(old) != len(new):
        return before if before is not None and new is None else graph.named(now)
    sizes = [a if b == "?" or isinstance(a, int) else b for a, b in zip(old, new, strict=True)]
    return tensor_type(dtype_of(now), sizes)


class _Beyond:
    """Finds types of values for which onnx infers no type, or a less precise type.

    The types follow from the operator, from computed shapes or, if nothing else is known, from the types that the model
    declares. Declared sizes of 1 are ignored, because exporters write 1 for an unknown size, or for a size that was 1
    during the export. A declared rank of 0 is ignored too, except for the result of a reduction.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.makers = graph.producers()
        self.values = ShapeValues(graph, self.makers)
        self._shapes: dict[int, tuple[TypeProto | None, Shape | None, bool]] = {}
        inputs = (graph.shape(name) or () for name in graph.input_names)
        self.borne = set[Dim](itertools.chain.from_iterable(inputs))
        self.outputs = {*graph.output_names} if graph.hints else set()
        stored = (shape_of(hint.type) or () for name, hint in graph.hints.items() if name in self.outputs)
        count = Counter(itertools.chain.from_iterable(stored))
        # symbols that occur once in the outputs, so that each names a single size
        self.names = {symbol for symbol in count if count[symbol] == 1}

    def types(self, node: Node) -> Types:
        """Return the types of a node's outputs that onnx does not find."""
        if node.op_type == "Loop" and all(name in self.graph.types for name in reads(node)):
            return dict(zip(node.output, loop_types(self.graph, node)[1], strict=False))
        found = _operator_types(self.graph, node, self.makers)
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
        observed = self._observed(node)
        hinted = {name: self._hinted(name) for name in outputs if name in self.graph.hints}
        trusted = {name: t for name, t in hinted.items() if t is not None and name not in observed}
        self.graph.assumed.update(trusted)
        self.graph.declared_shapes.update((*trusted, *observed))
        return trusted | observed

    def _shape(self, value_type: TypeProto | None) -> tuple[Shape | None, bool]:
        """Return the shape of a type, and True if it is known and all its symbols occur in the inputs.

        The result is cached, because many values share a type.
        """
        found = self._shapes.get(id(value_type))
        if found is None:
            shape = shape_of(value_type)
            plain = shape is not None and not any(isinstance(size, str) and size not in self.borne for size in shape)
            # value_type is kept alive, so that its id stays valid
            found = self._shapes[id(value_type)] = (value_type, shape, plain)
        return found[1:]

    def _observed(self, node: Node) -> Types:
        """Return the types of a node's outputs whose shape is known only from a run of the model."""
        graph = self.graph
        seen = {name: graph.observed[name] for name in node.output if name in graph.observed}
        lost = {name: value_type for name, value_type in seen.items() if graph.shape(name) is None}
        return {n: graph.named(tensor_type(dtype_of(t), shape_of(t))) for n, t in lost.items()}

    def _dtype(self, node: Node) -> int:
        """Return the element type of the first output of a node, or 0 if it is unknown.

        If onnx does not infer the type, it is that of the first input, except for a ConstantOfShape.
        """
        known = dtype_of(self.graph.types.get(node.output[0]))
        return known or (dtype_of(self.graph.types.get(node.input[0])) if node.op_type != "ConstantOfShape" else 0)

    def _hinted(self, name: str) -> TypeProto | None:
        """Return the type that the model declares for a value if inference finds none, otherwise None.

        For an output of the model, sizes that inference does not find are taken from the declared type.
        """
        hint, inferred = self.graph.hints[name].type, self.graph.types.get(name)
        known, said = shape_of(inferred), list[Dim | None]()
        meaning = self.borne | self.names if name in self.outputs else self.borne
        for size in shape_of(hint) or ():  # None stands for a size that is not trusted
            said.append(size if size in meaning or (isinstance(size, int) and size != 1) else None)
        if known is None and said:
            return self.graph.named(tensor_type(dtype_of(inferred) or dtype_of(hint), said))
        if known is None:
            # trusted without sizes: the rank 0 of a reduction's result, and a type without a shape if none is inferred
            trusted = inferred is None if shape_of(hint) is None else self.makers[name].op_type.startswith("Reduce")
            return hint if trusted else None
        if name not in self.outputs or len(said) != len(known):
            return None
        pairs = zip(known, said, strict=True)
        wider = [a if b is None or isinstance(a, int) or a in self.borne else b for a, b in pairs]
        return None if wider == list(known) else tensor_type(dtype_of(inferred), wider)


def inside(graph: Graph, body: GraphProto, types: Sequence[TypeProto]) -> Graph:
    """Return a body as a graph with inferred types, in which the inputs have the types `types`.

    Captured values have the types that they have outside.

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
    names = list(dict.fromkeys(captured_by(body)))
    for name, value_type in zip(names, _known_types(graph, names), strict=True):
        if graph.constant(name) is not None:
            inner.initializers[name] = graph.initializers[name]
        else:
            inner.add_input(name, value_type)
    infer_types(inner)
    return inner


def input_types(graph: Graph, node: Node) -> list[TypeProto]:
    """Return the types of the inputs of a node's body. The bodies of an If have no inputs.

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
    """Return the type of a slice along `axis`, without that axis."""
    shape = shape_of(value_type)
    kept = None if shape is None else [size for at, size in enumerate(shape) if at != axis % len(shape)]
    return tensor_type(dtype_of(value_type), kept)


def loop_types(graph: Graph, node: Node) -> tuple[list[TypeProto], list[TypeProto]]:
    """Return the types of the inputs of a Loop's body, and the types of the Loop's outputs.

    If an iteration provably keeps a dimension of a state, the dimension is the same in all iterations. If an iteration
    may change it, the dimension gets a new symbol. onnx itself infers no shapes for the states of a Loop.

    Raises:
        Unknown: the type of an initial value or of a captured value is unknown.
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
            if name in inner.types:  # onnx types an empty sequence as one of elements without a shape
                merged[j] = of_any_element(onnx.helper.make_sequence_type_proto(inner.types[name]))
        first = [None] * len(first)
        if merged == states:
            break
        states = merged
    trips = fixed_trips(graph, node, inner)
    length = graph.fresh_symbol() if trips is None else trips
    final = []
    for before, now in zip(states, after[1:], strict=False):
        final.append(of_any_element(now) if now.HasField("sequence_type") else with_fresh(graph, before, varying))
    rows = [stacked(value_type, length) for value_type in after[1 + len(states) :]]
    return [*counters, *states], [*final, *rows]


def _known_types(graph: Graph, names: Sequence[str]) -> list[TypeProto]:
    """Return the types of values.

    Raises:
        Unknown: a value has no type.
    """
    for name in names:
        if name not in graph.types:
            raise Unknown(f"the type of '{name}' is unknown")
    return [graph.types[name] for name in names]


# -- types that follow from the operator --------------------------------------------------------------------------


def _operator_types(graph: Graph, node: Node, makers: dict[str, Node]) -> Types:
    """Return the types of a node's outputs that follow from its operator; {} if onnx infers them or they are unknown.

    Args:
        graph: the graph of the node, with the types known so far.
        node: the node. `loop_types` handles a Loop.
        makers: value -> the node that computes it.
    """
    key = plain_domain(node.domain), node.op_type
    if key == ("", "Attention"):
        return _caches(graph, node)
    find = FINER.get(key) or MISSING.get(key)
    if key == ("", "Slice"):
        found = _cut_to_fit(graph, node, makers)
    elif find is None or (key in MISSING and graph.shape(node.output[0]) is not None):
        return {}
    else:
        found = find(graph, node)
    return {} if found is None else {node.output[0]: found}


def _compressed(graph: Graph, node: Node) -> TypeProto | None:
    """Compress: the size of one axis, the number of True conditions, is known only at run time.

    onnx infers this type from opset 11 on.
    """
    shape, axis = graph.shape(node.input[0]), attributes_of(node).get("axis")
    if shape is None:
        return None
    kept = [None] if axis is None else [None if at == axis % len(shape) else size for at, size in enumerate(shape)]
    return graph.named(tensor_type(dtype_of(graph.types[node.input[0]]), kept))


def _reduced(graph: Graph, node: Node) -> TypeProto | None:
    """Reductions whose axes are known only at run time: only the rank of the result is known.

    If axes are not kept, it is the rank of the input minus the number of axes. An empty list of axes means all axes,
    or none with noop_with_empty_axes.
    """
    if len(node.input) < 2 or not node.input[1] or (x := graph.shape(node.input[0])) is None:
        return None
    axes, given = graph.shape(node.input[1]), attributes_of(node)
    if given.get("keepdims", 1):
        gone = 0
    elif axes is None or len(axes) != 1 or not isinstance(axes[0], int):
        return None  # the standard does not allow axes as a scalar
    else:
        gone = axes[0] or len(x) * (not given.get("noop_with_empty_axes"))
    return graph.named(tensor_type(dtype_of(graph.types[node.input[0]]), [None] * (len(x) - gone)))


def _scores(graph: Graph, node: Node) -> TypeProto | None:
    """Operators in `SCORES`: one row of numbers for each sample."""
    samples = graph.shape(node.input[0])
    if graph.shape(node.output[0]) is not None:  # found in an earlier pass; it must be stated again
        return graph.types[node.output[0]]
    if samples is None:
        return None
    if node.op_type in LIKE_ROWS:
        return tensor_type(TensorProto.FLOAT, samples)
    return graph.named(tensor_type(TensorProto.FLOAT, [samples[0] if len(samples) > 1 else 1, None]))


def _encoded(graph: Graph, node: Node) -> TypeProto | None:
    """LabelEncoder: the result has the shape of the input. onnx infers no shape."""
    dtype, shape = dtype_of(graph.types.get(node.output[0])), graph.shape(node.input[0])
    return tensor_type(dtype, shape) if dtype and shape is not None else None


def _element(graph: Graph, node: Node) -> TypeProto | None:
    """SequenceAt: the sizes of the element get new symbols.

    onnx gives all elements of a sequence the same symbols, but their sizes may differ.
    """
    value_type = graph.types.get(node.output[0])
    shape = [size if isinstance(size, int) else None for size in shape_of(value_type) or ()]
    return graph.named(tensor_type(dtype_of(value_type), shape)) if None in shape else None


def _einsum(graph: Graph, node: Node) -> TypeProto | None:
    """Einsum: the sizes of the result are taken from all operands.

    onnx takes the size of an axis from the first operand that has the axis. If that size is unknown, another operand
    may broadcast the axis to a known one. An inferred size of 1 is kept.
    """
    inferred, shapes = graph.shape(node.output[0]), [graph.shape(name) for name in node.input]
    operands = [(name, shape) for name, shape in zip(node.input, shapes, strict=True) if shape is not None]
    if inferred is None or not 1 < len(operands) == len(node.input):
        return None
    try:
        shape = einsum_shape(attributes_of(node)["equation"].decode(), operands)
    except Unknown:
        return None
    wider = [a if a == 1 else b for a, b in zip(inferred, shape, strict=False)]
    if len(inferred) != len(shape) or wider == list(inferred):
        return None
    return graph.named(tensor_type(dtype_of(graph.types[node.output[0]]), wider))


def _cut_to_fit(graph: Graph, node: Node, makers: dict[str, Node]) -> TypeProto | None:
    """Slice: if it cuts a tensor to the shape that the tensor already has, the result has the type of the tensor.

    Exporters write such a Slice for the updates of an addition by indices (ScatterElements).
    """
    if len(node.input) != 3:  # it has axes or steps, or its bounds are attributes
        return None
    data, starts, ends = node.input
    shape, maker = graph.shape(data), makers.get(ends)
    first = graph.constant(starts) if starts in graph.initializers else None
    if shape is None or first is None or maker is None or maker.op_type != "Shape" or maker.attribute:
        return None
    fits = first.tolist() == [0] * len(shape) and graph.shape(maker.input[0]) == shape
    return graph.types[data] if fits and "?" not in shape and graph.shape(node.output[0]) != shape else None


def _caches(graph: Graph, node: Node) -> Types:
    """Attention: present keys, present values and scores have four axes."""
    found: Types = {}
    for at, name in enumerate(node.output[1:], 1):
        inferred = graph.types.get(name)
        dtype = dtype_of(inferred) or dtype_of(graph.types.get(node.input[at if at < 3 else 0]))
        if name and dtype and shape_of(inferred) is None:
            found[name] = graph.named(tensor_type(dtype, [None] * 4))
    return found


OperatorType = Callable[[Graph, Node], TypeProto | None]

FINER: dict[tuple[str, str], OperatorType] = {
    ("", "SequenceAt"): _element,
    ("", "Einsum"): _einsum,
    **dict.fromkeys(((ML, name) for name in SCORES), _scores),
}
"""(domain, operator) -> a function that returns the type of its output, which may be finer than the one onnx infers."""

MISSING: dict[tuple[str, str], OperatorType] = {
    ("", "Compress"): _compressed,
    (ML, "LabelEncoder"): _encoded,
    **dict.fromkeys((("", name) for name in REDUCTIONS), _reduced),
}
"""(domain, operator) -> a function that returns the type of its output, which is used if onnx infers no shape."""
