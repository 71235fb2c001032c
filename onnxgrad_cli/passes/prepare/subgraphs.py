"""Bring the branches of If and the bodies of Loop and Scan into the form of the graph around them.

Their constants become initializers of the model, so that weights in bodies are found. An If whose condition is constant
is replaced by the branch that runs. Every replacement of nodes in the model is applied to bodies too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from onnx import GraphProto, TensorProto

from onnxgrad_cli.errors import Unknown, UnsupportedError
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node, make_node, refill
from onnxgrad_cli.ir.node_values import body_of, subgraphs, with_bodies
from onnxgrad_cli.ir.renaming import rename, renamed
from onnxgrad_cli.ir.type_inference import input_types, inside

MOST_LOOPS = 6
"""Largest number of loops that may be nested.

Each time the types around a body are inferred, the types in the body are inferred several times.
"""


def check_depth(nodes: Iterable[Node], around: int = 0) -> None:
    """Refuse deeply nested loops, because the time to infer their types doubles with each level.

    Raises:
        UnsupportedError: more than `MOST_LOOPS` loops are nested.
    """
    for node in nodes:
        depth = around + (node.op_type in ("Loop", "Scan"))
        if depth > MOST_LOOPS:
            label = node.name or next(iter(node.output), "")
            raise UnsupportedError(
                f"node '{label}' ({node.op_type}) is nested in {around} loops; at most {MOST_LOOPS} levels of "
                "loops are supported",
                hint="export the model with fewer nested loops",
            )
        for body in subgraphs(node):
            check_depth(body.node, depth)


def hoist(graph: Graph, constant: Callable[[Node], TensorProto | None]) -> None:
    """Move the initializers and constants of all bodies to the model's initializers. Unique names don't change."""
    every = [body for node in with_bodies(graph.nodes) if node.attribute for body in subgraphs(node)]
    if not every:
        return
    made = Counter(name for node in with_bodies(graph.nodes) for name in node.output)
    made.update(value.name for body in every for value in (*body.input, *body.initializer))
    made.update({*graph.initializers, *graph.input_names})
    for body in every:
        _hoist(graph, body, constant, made)


def _hoist(graph: Graph, body: GraphProto, constant: Callable[[Node], TensorProto | None], made: Counter[str]) -> None:
    """Move the constants of a body to the model's initializers.

    Args:
        graph: the model.
        body: the body. Its nodes then read the constants by their new names.
        constant: returns the tensor of a Constant node, or None for another node.
        made: how often each name is defined in the model and its bodies.
    """
    found = _constants(body, constant)
    if not found:
        return
    returned = [value.name for value in body.output if value.name in found]
    names = {name: name if made[name] == 1 and name not in returned else graph.fresh(name) for name in found}
    for name, tensor in found.items():
        graph.store_tensor(names[name], tensor)
    for position in reversed(range(len(body.node))):  # in place: the caller holds other nodes' bodies
        if names.keys() & set(body.node[position].output):
            del body.node[position]
    rename(body.node, names)
    refill(body.initializer, [tensor for tensor in body.initializer if tensor.name not in found])
    for name in dict.fromkeys(returned):  # a body may return only its own values
        body.node.add(op_type="Identity", name=graph.fresh(f"{name}/Identity"), input=[names[name]], output=[name])


def _constants(body: GraphProto, constant: Callable[[Node], TensorProto | None]) -> dict[str, TensorProto]:
    """Return a map from each constant of a body to its tensor: initializers that are not inputs, and Constant nodes."""
    fed = {value.name for value in body.input}
    stored = {tensor.name: tensor for tensor in body.initializer if tensor.name not in fed}
    return stored | {node.output[0]: tensor for node in body.node if (tensor := constant(node)) is not None}


def separate_outputs(graph: Graph) -> None:
    """Insert Identity nodes so that all outputs of a body are distinct and computed in the body.

    Otherwise, onnxruntime leaves outputs unset: a value that a body returns twice, or an input that the body of a Scan
    returns.
    """
    for node in with_bodies(graph.nodes):
        for body in subgraphs(node):
            returned = {value.name for value in body.input} if node.op_type == "Scan" else set()
            for value in body.output:
                name = value.name
                if name in returned:
                    value.name = graph.fresh(f"{name}_out")
                    identity = graph.fresh(f"{value.name}/Identity")
                    body.node.add(op_type="Identity", name=identity, input=[name], output=[value.name])
                returned.add(name)


def choose_branches(graph: Graph) -> bool:
    """Replace each If with a constant condition by the branch that runs. Return True if there was one."""

    def chosen(node: Node) -> list[Node] | None:
        condition = graph.constant(node.input[0])
        if condition is None:
            return None
        return put_branch(graph, node, "then_branch" if condition.all() else "else_branch")

    return graph.rewrite(chosen, {"If"})


def put_branch(graph: Graph, node: Node, branch: str) -> list[Node]:
    """Return nodes that replace an If by one branch: the branch's nodes with unique names, and Identities for outputs.

    The initializers of the branch become initializers of the graph.
    """
    body = renamed(graph, body_of(node, branch))
    for tensor in body.initializer:
        graph.store_tensor(tensor.name, tensor)
    pairs = [(value.name, name) for name, value in zip(node.output, body.output, strict=True) if name]
    identities = [make_node("Identity", [a], [b], name=graph.fresh(f"{node.name}/Identity")) for a, b in pairs]
    return [*map(Node.read, body.node), *identities]


def settle_bodies(graph: Graph, settle: Callable[[Graph], None]) -> bool:
    """Apply `settle`, such as a part of `infer_and_lower`, to every body. Return True if a body changed."""
    changed = False
    for each, body in [(node, body) for node in graph.nodes for body in subgraphs(node)]:
        try:
            inner = inside(graph, body, input_types(graph, each))
        except Unknown:  # unchanged; code that needs its types reports them missing
            continue
        before = [n.message().SerializeToString() for n in inner.nodes]
        settle(inner)
        if before != [n.message().SerializeToString() for n in inner.nodes]:
            own = len(body.input)
            inner.hand_constants_to(graph)
            settled = inner.commit().graph
            del settled.input[own:]
            body.CopyFrom(settled)
            changed = True
    return changed
