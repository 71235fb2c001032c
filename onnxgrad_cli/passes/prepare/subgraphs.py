"""Bring the branches of If and the bodies of Loop and Scan into the form that the graph around them has.

Their constants become initializers of the model, so that weights are found wherever they stand; an If whose condition
is constant becomes its branch; and every step that replaces nodes of the model replaces those of bodies too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from onnx import AttributeProto, GraphProto, TensorProto

from onnxgrad_cli.errors import Unknown, UnsupportedError
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.inference import input_types, inside
from onnxgrad_cli.ir.node import Node, make_node
from onnxgrad_cli.ir.nodes import body_of, subgraphs, with_bodies
from onnxgrad_cli.ir.renaming import rename, renamed

MOST_LOOPS = 6
"""Loops in one another: the types of a body are inferred several times for each time that those around it are."""


def check_depth(nodes: Iterable[Node], around: int = 0) -> None:
    """Refuse loops that are nested so deep that the time to infer their types, which doubles with each, has no end.

    Raises:
        UnsupportedError: there are more than `MOST_LOOPS` in one another.
    """
    for node in nodes:
        depth = around + (node.op_type in ("Loop", "Scan"))
        if depth > MOST_LOOPS:
            label = node.name or next(iter(node.output), "")
            raise UnsupportedError(
                f"node '{label}' ({node.op_type}) stands in {around} other loops; at most {MOST_LOOPS} may be nested",
                hint="export the model with fewer loops in one another",
            )
        for body in subgraphs(node):
            check_depth(body.node, depth)


def hoist(graph: Graph, constant: Callable[[Node], TensorProto | None]) -> None:
    """Make the initializers and constants of all bodies initializers of the model; a name that occurs once stays."""
    every = [body for node in with_bodies(graph.nodes) if node.attribute for body in subgraphs(node)]
    if not every:
        return
    made = Counter(name for node in with_bodies(graph.nodes) for name in node.output)
    made.update(value.name for body in every for value in (*body.input, *body.initializer))
    made.update({*graph.initializers, *graph.input_names})
    for body in every:
        _hoist(graph, body, constant, made)


def _hoist(graph: Graph, body: GraphProto, constant: Callable[[Node], TensorProto | None], made: Counter[str]) -> None:
    """Make the constants of a body initializers of the model.

    Args:
        graph: the model.
        body: the body, whose nodes read the constants by their new names after that.
        constant: the tensor that a Constant node holds.
        made: how often each name is made in the model and its bodies.
    """
    found = _constants(body, constant)
    if not found:
        return
    returned = [value.name for value in body.output if value.name in found]
    alone = {name for name in found if made[name] == 1 and name not in returned}
    names = {name: name if name in alone else graph.fresh(name) for name in found}
    for name, tensor in found.items():
        copy = graph.proto.graph.initializer.add()
        copy.CopyFrom(tensor)
        copy.name = names[name]
        graph.initializers[copy.name] = copy
    overridable = [tensor for tensor in body.initializer if tensor.name not in found]
    for position in reversed(range(len(body.node))):  # in place: bodies of the other nodes have their turn yet
        if names.keys() & set(body.node[position].output):
            del body.node[position]
    rename(body.node, names)
    del body.initializer[:]
    body.initializer.extend(overridable)
    for name in dict.fromkeys(returned):  # a body returns its own values only
        body.node.add(op_type="Identity", name=graph.fresh(f"{name}/Identity"), input=[names[name]], output=[name])


def _constants(body: GraphProto, constant: Callable[[Node], TensorProto | None]) -> dict[str, TensorProto]:
    """The constants of a body: initializers that can't be fed, and Constant nodes."""
    fed = {value.name for value in body.input}
    stored = {tensor.name: tensor for tensor in body.initializer if tensor.name not in fed}
    return stored | {node.output[0]: tensor for node in body.node if (tensor := constant(node)) is not None}


def separate_outputs(graph: Graph) -> None:
    """Let every body return values of its own, each once: onnxruntime leaves unset what a body returns for the second
    time, and what a Scan's body returns of its inputs."""
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
    """Put the branch that is always taken in the place of an If whose condition is constant; whether there is one."""
    nodes: list[Node] = []
    changed = False
    for node in graph.nodes:
        condition = graph.constant(node.input[0]) if node.op_type == "If" else None
        if condition is None:
            nodes.append(node)
            continue
        changed = True
        nodes += put_branch(graph, node, "then_branch" if condition.all() else "else_branch")
    if changed:
        graph.set_nodes(nodes)
    return changed


def put_branch(graph: Graph, node: Node, branch: str) -> list[Node]:
    """Return the nodes of a branch of an If, under names of their own, and an Identity for each output of the If.

    The initializers of the branch become initializers of the graph.
    """
    body = renamed(graph, body_of(node, branch))
    for tensor in body.initializer:
        graph.proto.graph.initializer.append(tensor)
        graph.initializers[tensor.name] = graph.proto.graph.initializer[-1]
    pairs = zip(node.output, body.output, strict=True)
    identities = [
        make_node("Identity", [value.name], [name], name=graph.fresh(f"{node.name}/Identity"))
        for name, value in pairs
        if name
    ]
    return [*map(Node.read, body.node), *identities]


def settle_bodies(graph: Graph, settle: Callable[[Graph], None]) -> bool:
    """Do to every body what `settle` does to a graph; whether that changed any."""
    changed = False
    for node in graph.nodes:
        for given in node.attribute:
            if given.type != AttributeProto.GRAPH:
                continue
            try:
                inner = inside(graph, given.g, input_types(graph, node))
            except Unknown:  # left as it is; whoever needs its types says so
                continue
            before = [n.message().SerializeToString() for n in inner.nodes]
            settle(inner)
            if before != [n.message().SerializeToString() for n in inner.nodes]:
                own = len(given.g.input)
                inner.hand_constants_to(graph)
                body = inner.commit().graph
                del body.input[own:]
                given.g.CopyFrom(body)
                changed = True
    return changed
