"""Write the subgraphs (bodies) of If, Loop, Scan and SequenceMap, from nodes or from a `Graph`.

A body as a `Graph` has the inputs of the body, then the values that it captures from outside. Every pass that works on
a model therefore works on a body. The graph shares names, symbols and constants with the graph around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import onnx
from onnx import GraphProto, ModelProto, TypeProto, ValueInfoProto

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.errors import Unknown
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import make_node, messages
from onnxgrad_cli.ir.node_values import captured_by
from onnxgrad_cli.ir.types import Shape, dtype_of, element_type, shape_of, tensor_type

Body = Callable[..., tuple[Sequence[Val], Sequence[Val]]]
"""A function `body(op, states, steps)` that writes one step of a Scan.

`steps` has one slice of each sliced value. The function returns the next states, and the results of this step.
"""


def close(inner: Graph, op: Op, inputs: Sequence[Val], outputs: Sequence[Val]) -> GraphProto:
    """Return the body that computes `outputs` from `inputs` and captured values.

    The body consists of the nodes of `inner`, then those of `op`. Unused nodes are left out.

    Args:
        inner: the graph in which `op` emitted nodes; its nodes and outputs are replaced.
        op: the emitter.
        inputs: the inputs of the body. The element type and rank of each are declared.
        outputs: the outputs of the body, which get new names.
    """
    results = [inner.fresh(f"{value.name}_out") for value in outputs]  # two outputs of a body must not share a name
    copies = [
        make_node("Identity", [value.name], [name], name=inner.fresh(f"{name}/Identity"))
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
    op: Op, body: Body, states: Sequence[Val], steps: Sequence[Val], *, reverse: bool = False
) -> tuple[list[Val], list[Val]]:
    """Emit a Scan over axis 0 of `steps`.

    For a target without Scan, the nodes of all steps are written one after the other. This requires that the number of
    steps is known and at most `UNROLLED`.

    Args:
        op: the emitter.
        body: a function that writes one step; see `Body`.
        states: the states before the first step.
        steps: the values that are sliced along axis 0, one slice per step.
        reverse: True to start at the last slice.

    Returns:
        The last states, and the results of all steps stacked in the order of `steps`.
    """
    length = steps[0].shape[0] if steps else None
    few = isinstance(length, int) and 0 < length <= UNROLLED
    if op.variant("steps", ("scan", "unrolled") if few else ("scan",), "scan") == "unrolled":
        return _unrolled(op, body, states, steps, reverse)
    inner = op.within(f"{op.scope}/step")

    def given(like: Val, shape: Shape) -> Val:
        name = op.graph.fresh(f"{inner.scope}/in")
        op.graph.types[name] = tensor_type(like.dtype, shape)
        return inner.val(name)

    inputs = [given(v, v.shape) for v in states], [given(v, v.shape[1:]) for v in steps]
    after, results = body(inner, *inputs)
    outputs = _apart(inner, [*after, *results])

    def declare(values: Iterable[Val]) -> list[ValueInfoProto]:
        return [onnx.helper.make_value_info(v.name, v.type or TypeProto()) for v in values]

    nodes, name = messages(inner.nodes), op.graph.fresh(f"{inner.scope}/body")
    found = op.emit(
        "Scan",
        *states,
        *steps,
        outputs=len(outputs),
        body=onnx.helper.make_graph(nodes, name, declare([*inputs[0], *inputs[1]]), declare(outputs)),
        num_scan_inputs=len(steps),
        scan_input_directions=[int(reverse)] * len(steps),
        scan_output_directions=[int(reverse)] * len(results),
    )
    found = list(found) if len(outputs) > 1 else [found]
    return found[: len(states)], found[len(states) :]


def _apart(inner: Op, values: Iterable[Val]) -> list[Val]:
    """Add Identity nodes so that a body computes every output itself, and no output appears twice.

    Otherwise onnxruntime leaves an output unset.
    """
    made = {name for node in inner.nodes for name in node.output}
    outputs: dict[str, Val] = {}
    for value in values:
        while value.name not in made or value.name in outputs:
            value = inner.Identity(value)
            made.add(value.name)
        outputs[value.name] = value
    return list(outputs.values())


def _unrolled(
    op: Op, body: Body, states: Sequence[Val], steps: Sequence[Val], reverse: bool
) -> tuple[list[Val], list[Val]]:
    """Return the results of `scan`, computed by nodes that are unrolled over the steps."""
    length = steps[0].shape[0]
    assert isinstance(length, int)
    single = [[op.squeeze(each, [0]) for each in op.split(v, [1] * length, 0)] for v in steps]
    found: list[Sequence[Val]] = []
    for step in reversed(range(length)) if reverse else range(length):
        states, results = body(op, states, [each[step] for each in single])
        found.append(results)
    in_order = reversed(found) if reverse else found
    stacked = ([op.unsqueeze(v, [0]) for v in each] for each in zip(*in_order, strict=True))
    return list(states), [parts[0] if length == 1 else op.Concat(*parts, axis=0) for parts in stacked]


UNROLLED = 256
"""Largest number of steps for which a Scan is unrolled.

For more steps, the time to load a model grows faster than its number of nodes.
"""


def when(op: Op, condition: Val, then: Callable[[Op], Mapping[str, Val]]) -> dict[str, Val]:
    """Emit an If that replaces values if `condition` is true. If it is false, the values stay the same.

    Args:
        op: the emitter.
        condition: a boolean scalar.
        then: a function that writes nodes with the emitter it gets, and returns the name of each value to replace ->
            the new value, which has the same type.

    Returns:
        The name of each value to replace -> its value after the If.
    """

    def branch(inner: Op, values: Mapping[str, Val]) -> GraphProto:
        results = {op.graph.fresh(f"{name}_out"): value for name, value in values.items()}
        inner.rename_all(results)
        outputs = [onnx.helper.make_value_info(name, op.graph.types[name]) for name in results]
        return onnx.helper.make_graph(messages(inner.nodes), op.graph.fresh(f"{inner.scope}/body"), [], outputs)

    taken, left = op.within(f"{op.scope}/then"), op.within(f"{op.scope}/else")
    after = then(taken)
    taken.scope = f"{op.scope}/then"
    found = op.emit(
        "If",
        condition,
        outputs=len(after),
        types=[op.val(name).type or TypeProto() for name in after],
        then_branch=branch(taken, after),
        else_branch=branch(left, {name: left.val(name) for name in after}),
    )
    return dict(zip(after, found if len(after) > 1 else [found], strict=True))


def select(op: Op, condition: Val, then: Callable[[Op], Mapping[str, Val]]) -> dict[str, Val]:
    """Replace values as `when` does, but without an If: nodes of `then` always run, and a Where selects the values."""
    scope = op.scope
    after = then(op)
    op.scope = scope
    return {name: op.Where(condition, value, op.val(name)) for name, value in after.items()}


def declared(name: str, value_type: TypeProto | None) -> ValueInfoProto:
    """Return a declaration of a value in a body: its element type and rank. Sizes may change, so they are left out."""
    shape = shape_of(value_type)
    if value_type is None or shape is None:
        return onnx.helper.make_value_info(name, value_type or TypeProto())
    return onnx.helper.make_value_info(name, tensor_type(dtype_of(value_type), [None] * len(shape)))


def map_elements(op: Op, function: Callable[..., Val], *sequences: Val) -> Val:
    """Apply `function(op, *elements)` to the elements of equally long sequences, and return the sequence of results."""
    model = ModelProto(ir_version=op.graph.proto.ir_version, graph=GraphProto(name="elements"))
    model.opset_import.extend(op.graph.proto.opset_import)
    inner = Graph(model)
    inner.share_names(op.graph)
    within = op.within(graph=inner)
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
    """Return the sum of two cotangents of a value. Sequences are added element by element."""
    return map_elements(op, lambda _, x, y: x + y, a, b) if a.is_sequence else a + b


def zeros_like(op: Op, x: Val) -> Val:
    """Return the zero cotangent of a value: a tensor of zeros, or a sequence of them.

    Raises:
        Unknown: the value is an optional, which may be empty.
    """
    if not x.is_tensor and not x.is_sequence:
        raise Unknown(f"'{x.name}' is an optional, whose gradient is unknown", "export the model without optionals")
    return map_elements(op, lambda op, e: op.fill(0.0, e), x) if x.is_sequence else op.fill(0.0, x)
