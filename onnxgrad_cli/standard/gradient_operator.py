"""The Gradient operator of ai.onnx.preview.training, which no runtime has a kernel for, in standard operators.

Each Gradient is replaced, one after the other, by the reverse-mode walk over the nodes between the tensors it names;
so the next one may differentiate its result. Source: the operator's page,
https://onnx.ai/onnx/operators/onnx_aionnxpreviewtraining_Gradient.html.
"""

from __future__ import annotations

from collections.abc import Collection
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from onnx import GraphProto, ModelProto

from onnxgrad_cli.autodiff.definitions.preview import PREVIEW
from onnxgrad_cli.autodiff.reverse import differentiate, or_zero
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node, copied, make_node, messages
from onnxgrad_cli.ir.nodes import reads, with_bodies
from onnxgrad_cli.ir.renaming import rename, renamed
from onnxgrad_cli.passes.cleanup.cleanup import tidy
from onnxgrad_cli.passes.gradient_op import is_gradient
from onnxgrad_cli.passes.outputs import forget_domain
from onnxgrad_cli.passes.prepare.admit import FIRST_WITH_CONSTANTS
from onnxgrad_cli.passes.prepare.normalise import normalise
from onnxgrad_cli.passes.prepare.settle import settle
from onnxgrad_cli.record import Training
from onnxgrad_cli.standard.gradient_request import Request, read_what_is_named


def expand_gradients(model: ModelProto, path: Path | None = None, training: Training | None = None) -> ModelProto:
    """Replace every Gradient node by the graph that computes it; a model without one stays as it is.

    The i-th output is the derivative of `y` with respect to the i-th of `xs`, the others of `xs` and `zs` held fixed,
    at the values that are fed. The operator's page leaves open what that is for a `y` of several elements: here it is
    the gradient of their sum, as with TensorFlow's `tf.gradients`, so that a result has the shape of its x.
    What `y` needs besides `xs` and `zs` must be constant; an initializer that they do not name counts as such.
    Where other tensors than the named ones are fed, the nodes between `xs`, `zs` and `y` are copied on those.

    Args:
        model: the model, which is changed in place: its functions are inlined, and its opset is raised where the
            gradients need it. Inputs, outputs and what they compute stay.
        path: where it was read from; external data are relative to it.
        training: where the rules used and the cautions are recorded.

    Returns:
        The model.

    Raises:
        UsageError: a node names or is fed what it can't be.
        UnsupportedError: a node stands in the body of another, or something between x and y can't be differentiated.
    """
    if not has_gradients(model):
        return model
    graph, training = Graph(model, path), training or Training()
    graph.proto.ir_version = max(graph.proto.ir_version, FIRST_WITH_CONSTANTS)
    read_what_is_named(graph)
    normalise(graph)
    _sort(graph)
    for node in filter(is_gradient, graph.nodes):
        graph.vary(Request(node).named)
    own: set[str] = set()
    while any(map(is_gradient, graph.nodes)):
        settle(graph, training)
        own = own or {name for node in graph.nodes for name in node.output}
        position = next(i for i, node in enumerate(graph.nodes) if is_gradient(node))
        request = Request(graph.nodes[position])
        request.check(graph)
        written = _copied(graph, request) if request.fed != request.named else _derived(graph, request, training)
        graph.set_nodes([*graph.nodes[:position], *written, *graph.nodes[position + 1 :]])
        tidy(graph, own)
    _read_past_copies(graph, own)
    forget_domain(graph, PREVIEW)
    return graph.commit()


def has_gradients(model: ModelProto) -> bool:
    """Whether a model has a Gradient node, in a body or a function perhaps."""
    every = [model.graph.node, *(function.node for function in model.functions)]
    return any(is_gradient(node) for nodes in every for node in with_bodies(nodes))


def _sort(graph: Graph) -> None:
    """Put every Gradient behind the y it names, which the standard does not ask for."""
    made = {name: i for i, node in enumerate(graph.nodes) for name in node.output if name}
    before = {i: [made[name] for name in reads(node) if name in made] for i, node in enumerate(graph.nodes)}
    if all(j < i for i, needs in before.items() for j in needs):
        return
    try:
        order = list(TopologicalSorter(before).static_order())
    except CycleError as error:
        circle = next(Request(graph.nodes[i]) for i in error.args[1] if is_gradient(graph.nodes[i]))
        raise UsageError(
            f"{circle.what} is part of what it differentiates: '{circle.y}' depends on its outputs",
            "copy the nodes that are to be differentiated apart from those that use the gradient",
        ) from None
    graph.set_nodes(graph.nodes[i] for i in order)


def _copied(graph: Graph, request: Request) -> list[Node]:
    """The differentiated nodes once more on copies of what is fed, and the Gradient of those."""
    names = {name: graph.fresh(name) for name in request.named}
    own = list(names.values())
    given = [
        make_node("Identity", [value], [name], name=graph.fresh(f"{name}/Identity"))
        for name, value in zip(own, request.fed, strict=True)
    ]
    needed = graph.ancestors([request.y], request.named)
    dependent, between = set(request.named), []
    for node in graph.nodes:
        if needed.intersection(node.output) and dependent.intersection(reads(node)):
            between.append(node)
            dependent.update(node.output)
    copies = renamed(graph, GraphProto(node=messages(between)), names).node
    made = {a: b for old, new in zip(between, copies, strict=True) for a, b in zip(old.output, new.output, strict=True)}
    again = copied(request.node)
    again.input[:] = [*own, *own, made.get(request.y, names.get(request.y, request.y))]
    return [*given, *copies, again]


def _read_past_copies(graph: Graph, own: Collection[str]) -> None:
    """Remove the copies that stood for named tensors: onnxruntime 1.31 loses that of an input in `copy * (1 / b)`."""
    names: dict[str, str] = {}
    for node in graph.nodes:
        if node.op_type == "Identity" and node.output[0] not in own:
            names[node.output[0]] = names.get(node.input[0], node.input[0])
    graph.set_nodes(node for node in graph.nodes if names.keys().isdisjoint(node.output))
    rename(graph.nodes, names)


def _derived(graph: Graph, request: Request, training: Training) -> list[Node]:
    """The nodes that compute the outputs which have a name."""
    op = Op(graph)
    op.role = "backward"
    op.scope = request.node.name
    asked = {x: output for x, output in zip(request.xs, request.node.output, strict=False) if output}
    found = differentiate(graph, {request.y: op.fill(1.0, op.val(request.y))}, asked, op, training)
    op.forward, op.scope = "", request.node.name
    op.rename_all({output: or_zero(op, x, found[x], training) for x, output in asked.items()})
    graph.types.update((output, graph.types[x]) for x, output in asked.items())
    return op.nodes
