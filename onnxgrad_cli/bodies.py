"""Subgraphs: the branches of If and the bodies of Loop and Scan, as graphs of their own and back.

A body becomes a `Graph` whose inputs are its own and, after them, the values it captures from outside; so every pass
that works on a model works on it. Names, symbols and constants are shared with the graph around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, ValueInfoProto

from onnxgrad_cli.emit import Op, Unknown, Val
from onnxgrad_cli.graph import Dim, Graph, Shape, captured_by, dtype_of, element_type, shape_of, tensor_type


def renamed(graph: Graph, body: GraphProto, outer: Mapping[str, str] | None = None) -> GraphProto:
    """A copy of a body with names that nothing in the model bears, or those in `outer`, which also renames captures."""
    copy = GraphProto()
    copy.CopyFrom(body)
    names = dict(outer or {})

    def own(name: str) -> str:
        if name and name not in names:
            names[name] = graph.fresh(name)
        return names.get(name, name)

    for given in (*copy.input, *copy.initializer):
        given.name = own(given.name)
    for sparse in copy.sparse_initializer:
        sparse.values.name = own(sparse.values.name)
    for node in copy.node:
        node.name = graph.fresh(node.name or node.op_type)
        node.input[:] = [names.get(name, name) for name in node.input]
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                attribute.g.CopyFrom(renamed(graph, attribute.g, names))
        node.output[:] = [own(name) for name in node.output]
    for value in copy.output:
        value.name = names.get(value.name, value.name)
        value.type.CopyFrom(_without_shape(value.type))  # exporters say of a branch that gives none what the other has
    del copy.value_info[:]
    return copy


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
        value.type.CopyFrom(_without_shape(value.type))
    inner = Graph(model)
    inner.share_names(graph)
    for name in dict.fromkeys(captured_by(body)):
        if name not in graph.types:
            raise Unknown(f"the type of '{name}' is unknown")
        if graph.constant(name) is not None:
            inner.initializers[name] = graph.initializers[name]
        else:
            inner.add_input(name, graph.types[name])
    inner.infer()
    return inner


def _without_shape(value_type: TypeProto) -> TypeProto:
    return tensor_type(dtype_of(value_type), None) if value_type.HasField("tensor_type") else value_type


def close(inner: Graph, op: Op, inputs: Sequence[Val], outputs: Sequence[Val]) -> GraphProto:
    """The body that computes `outputs` from `inputs` and what it captures: the nodes of `inner` and then those of `op`,
    as far as they are needed."""
    results = [inner.fresh(f"{value.name}_out") for value in outputs]  # two outputs never share a name
    copies = [
        onnx.helper.make_node("Identity", [value.name], [name], name=inner.fresh(f"{name}/Identity"))
        for value, name in zip(outputs, results, strict=True)
    ]
    inner.nodes = [*inner.nodes, *op.nodes, *copies]
    del inner.proto.graph.output[:]
    inner.proto.graph.output.extend(declared(n, value.type) for n, value in zip(results, outputs, strict=True))
    inner.remove_unused()
    body = inner.commit().graph
    del body.input[:]
    body.input.extend(declared(value.name, value.type) for value in inputs)
    read = set(captured_by(GraphProto(node=body.node, output=body.output)))
    kept = [tensor for tensor in body.initializer if tensor.name in read]
    del body.initializer[:]
    body.initializer.extend(kept)
    return body


def scan(
    op: Op,
    body: Callable[..., tuple[Sequence[Val], Sequence[Val]]],
    states: Sequence[Val],
    steps: Sequence[Val],
    *,
    reverse: bool = False,
) -> tuple[list[Val], list[Val]]:
    """Emit a Scan of `body(op, states, steps) -> (states, results)` over axis 0 of `steps`, from its end if `reverse`.

    Returns:
        The last states, and each step's results stacked in the order of `steps`.
    """
    inner = Op(op.graph)
    inner.role, inner.forward, inner.scope = op.role, op.forward, f"{op.scope}/step"

    def given(like: Val, shape: Shape) -> Val:
        name = op.graph.fresh(f"{inner.scope}/in")
        op.graph.types[name] = tensor_type(like.dtype, shape)
        return inner.val(name)

    inputs = [given(v, v.shape) for v in states], [given(v, v.shape[1:]) for v in steps]
    after, results = body(inner, *inputs)
    made = {name for node in inner.nodes for name in node.output}
    outputs = [v if v.name in made else inner.Identity(v) for v in (*after, *results)]

    def declare(values: Iterable[Val]) -> list[ValueInfoProto]:
        return [onnx.helper.make_value_info(v.name, v.type or TypeProto()) for v in values]

    found = op.emit(
        "Scan",
        *states,
        *steps,
        outputs=len(outputs),
        body=onnx.helper.make_graph(
            inner.nodes, op.graph.fresh(f"{inner.scope}/body"), declare([*inputs[0], *inputs[1]]), declare(outputs)
        ),
        num_scan_inputs=len(steps),
        scan_input_directions=[int(reverse)] * len(steps),
        scan_output_directions=[int(reverse)] * len(results),
    )
    found = list(found) if len(outputs) > 1 else [found]
    return found[: len(states)], found[len(states) :]


def when(op: Op, condition: Val, then: Callable[[Op], Mapping[str, Val]]) -> dict[str, Val]:
    """Emit an If in which values are replaced where `condition` holds, and else stay, without any work.

    Args:
        condition: a boolean scalar.
        then: writes what is done with the emitter it gets, and returns value -> what replaces it, of the same type.

    Returns:
        What `then` has named -> its value after that.
    """

    def branch(inner: Op, values: Mapping[str, Val]) -> GraphProto:
        results = {op.graph.fresh(f"{name}_out"): value for name, value in values.items()}
        inner.rename_all(results)
        outputs = [onnx.helper.make_value_info(name, op.graph.types[name]) for name in results]
        return onnx.helper.make_graph(inner.nodes, op.graph.fresh(f"{inner.scope}/body"), [], outputs)

    taken, left = Op(op.graph), Op(op.graph)
    taken.role = left.role = op.role
    taken.scope, left.scope = f"{op.scope}/then", f"{op.scope}/else"
    scope = taken.scope
    after = then(taken)
    taken.scope = scope
    found = op.emit(
        "If",
        condition,
        outputs=len(after),
        types=[op.val(name).type or TypeProto() for name in after],
        then_branch=branch(taken, after),
        else_branch=branch(left, {name: left.val(name) for name in after}),
    )
    return dict(zip(after, found if len(after) > 1 else [found], strict=True))


def declared(name: str, value_type: TypeProto | None) -> ValueInfoProto:
    """A declaration of a value in a body: its element type and rank, for sizes may differ from run to run."""
    shape = shape_of(value_type)
    if value_type is None or shape is None:
        return onnx.helper.make_value_info(name, value_type or TypeProto())
    return onnx.helper.make_value_info(name, tensor_type(dtype_of(value_type), [None] * len(shape)))


def map_elements(op: Op, function: Callable[..., Val], *sequences: Val) -> Val:
    """The sequence of `function(op, *elements)` over the elements of sequences of one length."""
    model = ModelProto(ir_version=op.graph.proto.ir_version, graph=GraphProto(name="elements"))
    model.opset_import.extend(op.graph.proto.opset_import)
    inner = Graph(model)
    inner.share_names(op.graph)
    within = Op(inner)
    within.role, within.forward = op.role, op.forward
    elements = []
    for sequence in sequences:
        value_type = element_type(sequence.type)
        if value_type is None:
            raise Unknown(f"the type of the elements of '{sequence.name}' is unknown")
        elements.append(inner.fresh(f"{sequence.name}_element"))
        inner.add_input(elements[-1], value_type)
    values = [within.val(name) for name in elements]
    result = function(within, *values)
    assert result.type is not None
    body = close(inner, within, values, [result])
    types = [onnx.helper.make_sequence_type_proto(result.type)]
    return op.emit("SequenceMap", *sequences, body=body, types=types)


def add(op: Op, a: Val, b: Val) -> Val:
    """The sum of two cotangents of one value, element by element where that is a sequence."""
    return map_elements(op, lambda _, x, y: x + y, a, b) if a.is_sequence else a + b


def zeros_like(op: Op, x: Val) -> Val:
    """The zero cotangent of a value in full: a tensor, or a sequence of them."""
    return map_elements(op, lambda op, e: op.fill(0.0, e), x) if x.is_sequence else op.fill(0.0, x)


def attribute(node: NodeProto, name: str) -> GraphProto:
    """The body in an attribute of a node; a change of it is a change of the node."""
    return next(a.g for a in node.attribute if a.name == name)


def input_types(graph: Graph, node: NodeProto) -> list[TypeProto]:
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
    given = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    missing = [name for name in node.input if name not in graph.types]
    if missing:
        raise Unknown(f"the type of '{missing[0]}' is unknown")
    types = [graph.types[name] for name in node.input]
    sliced = given["num_scan_inputs"]
    axes = given.get("scan_input_axes") or [0] * sliced
    states = len(types) - sliced
    return types[:states] + [_slice(t, axis) for t, axis in zip(types[states:], axes, strict=True)]


def _slice(value_type: TypeProto, axis: int) -> TypeProto:
    """The type of a slice along `axis`."""
    shape = shape_of(value_type)
    kept = None if shape is None else [size for at, size in enumerate(shape) if at != axis % len(shape)]
    return tensor_type(dtype_of(value_type), kept)


def loop_types(graph: Graph, node: NodeProto) -> tuple[list[TypeProto], list[TypeProto]]:
    """The types of the inputs of a Loop's body, and of the Loop's outputs.

    A dimension of a state that an iteration provably keeps is the same in all of them; one that it may change gets a
    symbol of its own. (onnx gives the states of a Loop no shape at all.)

    Raises:
        Unknown: the type of an initial value or of a captured one is unknown.
    """
    body = attribute(node, "body")
    initial = list(node.input[2:])
    for name in initial:
        if name not in graph.types:
            raise Unknown(f"the type of '{name}' is unknown")
    states = [graph.types[name] for name in initial]
    empty = {name for made in graph.nodes if made.op_type == "SequenceEmpty" for name in made.output}
    inserted = {made.input[0]: made.input[1] for made in body.node if made.op_type == "SequenceInsert"}
    first = [inserted.get(value.name) if n in empty else None for n, value in zip(initial, body.input[2:], strict=True)]
    counters = [tensor_type(TensorProto.INT64, []), tensor_type(TensorProto.BOOL, [])]
    varying: set[str] = set()
    while True:
        inner = inside(graph, body, [*counters, *states])
        after = [inner.types.get(value.name, TypeProto()) for value in body.output]
        merged = [_meet(graph, *pair, varying) for pair in zip(states, after[1:], strict=False)]
        for j, name in enumerate(first):
            if name in inner.types:  # onnx takes an empty sequence for one of elements without a shape
                merged[j] = _of_any_element(onnx.helper.make_sequence_type_proto(inner.types[name]))
        first = [None] * len(first)
        if merged == states:
            break
        states = merged
    trips = fixed_trips(graph, node, inner)
    length = graph.fresh_symbol() if trips is None else trips
    final = [_with_fresh(graph, value_type, varying) for value_type in states]
    stacked = []
    for value_type in after[1 + len(states) :]:
        inner_shape = shape_of(value_type)
        stacked.append(tensor_type(dtype_of(value_type), None if inner_shape is None else [length, *inner_shape]))
    return [*counters, *states], [*final, *stacked]


def fixed_trips(graph: Graph, node: NodeProto, inner: Graph) -> int | None:
    """How often a Loop with the typed body `inner` runs, where that is known at build time."""
    limit, start = (graph.constant(name) if name else None for name in node.input[:2])
    starts = not node.input[1] or (start is not None and bool(start.all()))
    return int(limit.item()) if limit is not None and starts and _keeps_going(inner) else None


def _keeps_going(inner: Graph) -> bool:
    """Whether the condition that a body returns is always true, given that it was before."""
    made = inner.producers()
    name = inner.output_names[0]
    while name in made and made[name].op_type == "Identity":
        name = made[name].input[0]
    known = inner.constant(name)
    if name in made and made[name].op_type == "Constant":
        known = onnx.numpy_helper.to_array(made[name].attribute[0].t)
    return name == inner.input_names[1] or (known is not None and bool(known.all()))


def _meet(graph: Graph, before: TypeProto, after: TypeProto, varying: set[str]) -> TypeProto:
    """The type that a state has before and after an iteration."""
    if not before.HasField("tensor_type"):
        return _of_any_element(after)  # onnx has met the types of the elements
    old, new = shape_of(before), shape_of(after)
    if old is None or new is None or len(old) != len(new):
        return tensor_type(dtype_of(before), None)
    shape: list[Dim] = []
    for was, now in zip(old, new, strict=True):
        if was != now and was not in varying:
            was = graph.fresh_symbol()
            varying.add(was)
        shape.append(was)
    return tensor_type(dtype_of(before), shape)


def _of_any_element(value_type: TypeProto) -> TypeProto:
    """The type of a sequence whose elements may differ in every size that is not a number."""
    element = element_type(value_type)
    shape = shape_of(element)
    if element is None or shape is None:
        return value_type
    sizes = [size if isinstance(size, int) else None for size in shape]
    return onnx.helper.make_sequence_type_proto(tensor_type(dtype_of(element), sizes))


def _with_fresh(graph: Graph, value_type: TypeProto, varying: set[str]) -> TypeProto:
    """The type of a state after the last iteration."""
    shape = shape_of(value_type)
    if shape is None:
        return value_type
    return tensor_type(dtype_of(value_type), [graph.fresh_symbol() if dim in varying else dim for dim in shape])
