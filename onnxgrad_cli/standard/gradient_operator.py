"""Replace the Gradient operator of ai.onnx.preview.training, which has no kernel in any runtime, by standard operators.

The Gradient nodes are replaced one after the other, so a later one may differentiate the result of an earlier one. Each
is replaced by the reverse-mode gradient of the nodes between the tensors that it names. A Gradient node names these
tensors in attributes, where code for ordinary nodes does not look for names. So each node first gets the named tensors
as additional inputs. Then code that sorts, renames or removes nodes needs no special case for Gradient nodes.

Source: the operator's page, https://onnx.ai/onnx/operators/onnx_aionnxpreviewtraining_Gradient.html.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from onnx import FunctionProto, GraphProto, ModelProto

from onnxgrad_cli import errors
from onnxgrad_cli.autodiff.reverse import differentiate, or_zero
from onnxgrad_cli.common.flags import listed
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.errors import Refusal, UnsupportedError
from onnxgrad_cli.ir.domains import PREVIEW
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.modes import INITIALIZERS_ALONE
from onnxgrad_cli.ir.node import Node, copied, make_node, messages, write
from onnxgrad_cli.ir.node_values import depending_on, has_gradients, is_gradient, reads, subgraphs, with_bodies
from onnxgrad_cli.ir.renaming import rename, renamed
from onnxgrad_cli.ir.types import dtype_of, in_words, is_float, shape_of
from onnxgrad_cli.passes.cleanup import tidy
from onnxgrad_cli.passes.declare_outputs import forget_domain
from onnxgrad_cli.passes.gradient_op import xs_zs_y
from onnxgrad_cli.passes.prepare.infer_and_lower import infer_and_lower
from onnxgrad_cli.passes.prepare.normalise import normalise
from onnxgrad_cli.record import Training


def expand_gradients(model: ModelProto, path: Path | None = None, training: Training | None = None) -> ModelProto:
    """Replace every Gradient node of a model by the nodes that compute it.

    The i-th output of a Gradient node is the derivative of `y` with respect to the i-th tensor of `xs`, at the values
    that are fed to the node. The other tensors of `xs` and `zs` are constants. The operator's page does not define the
    derivative of a `y` with several elements. Here it is the gradient of their sum, as in TensorFlow's `tf.gradients`,
    so each result has the shape of its tensor of `xs`. Apart from `xs` and `zs`, `y` may depend only on constants. An
    initializer that `xs` and `zs` do not name counts as a constant. If the tensors fed to a node are not the tensors
    that it names, the nodes between `xs`, `zs` and `y` are copied, and the copies read the fed tensors.

    Args:
        model: the model, which is changed in place: its functions are inlined, and its opset is raised if the gradients
            need that. Its inputs, its outputs and their values stay the same.
        path: the file that the model was read from; paths of external data are relative to it.
        training: the record that gets the rules used and the cautions.

    Returns:
        The model.

    Raises:
        UsageError: a node names or is fed an unsuitable tensor.
        UnsupportedError: a node is in the body of another node, or a node between x and y can't be differentiated.
    """
    if not has_gradients(model):
        return model
    graph, training = Graph(model, path), training or Training()
    graph.proto.ir_version = max(graph.proto.ir_version, INITIALIZERS_ALONE)
    read_what_is_named(graph)
    normalise(graph)
    _sort(graph)
    for node in filter(is_gradient, graph.nodes):
        graph.vary(GradientRequest(node).named)
    own: set[str] = set()
    while any(map(is_gradient, graph.nodes)):
        infer_and_lower(graph, training)
        own = own or {name for node in graph.nodes for name in node.output}
        position = next(i for i, node in enumerate(graph.nodes) if is_gradient(node))
        request = GradientRequest(graph.nodes[position])
        request.check(graph)
        written = _copied(graph, request) if request.fed != request.named else _derived(graph, request, training)
        graph.set_nodes([*graph.nodes[:position], *written, *graph.nodes[position + 1 :]])
        tidy(graph, own)
    _read_past_copies(graph, own)
    forget_domain(graph, PREVIEW)
    return graph.commit()


def _sort(graph: Graph) -> None:
    """Sort the nodes so that every Gradient follows the node that computes its y. The standard allows any order."""
    made = {name: i for i, node in enumerate(graph.nodes) for name in node.output if name}
    before = {i: [made[name] for name in reads(node) if name in made] for i, node in enumerate(graph.nodes)}
    if all(j < i for i, needs in before.items() for j in needs):
        return
    try:
        order = list(TopologicalSorter(before).static_order())
    except CycleError as error:
        circle = next(GradientRequest(graph.nodes[i]) for i in error.args[1] if is_gradient(graph.nodes[i]))
        message = f"{circle.what} is part of the graph that it differentiates, because '{circle.y}' depends on it"
        hint = f"compute '{circle.y}' from copies of these nodes that do not read the outputs of the Gradient node"
        raise errors.conflict(message, hint) from None
    graph.set_nodes(graph.nodes[i] for i in order)


def _copied(graph: Graph, request: GradientRequest) -> list[Node]:
    """Return copies of the differentiated nodes, which read the fed tensors, and a Gradient node for the copies."""
    names = {name: graph.fresh(name) for name in request.named}
    own = list(names.values())
    given = [
        make_node("Identity", [value], [name], name=graph.fresh(f"{name}/Identity"))
        for name, value in zip(own, request.fed, strict=True)
    ]
    needed = graph.ancestors([request.y], request.named)
    dependent = depending_on(graph.nodes, request.named)
    between = [n for n in graph.nodes if needed.intersection(n.output) and dependent.intersection(reads(n))]
    copies = renamed(graph, GraphProto(node=messages(between)), names).node
    made = {a: b for old, new in zip(between, copies, strict=True) for a, b in zip(old.output, new.output, strict=True)}
    again = copied(request.node)
    again.input[:] = [*own, *own, made.get(request.y, names.get(request.y, request.y))]
    return [*given, *copies, again]


def _read_past_copies(graph: Graph, own: Collection[str]) -> None:
    """Remove the Identity nodes that `_copied` wrote for fed tensors, so that their readers read these tensors.

    onnxruntime 1.31 wrongly drops the Identity of an input in `copy * (1 / b)`, so these nodes must not stay.

    Args:
        graph: the graph.
        own: the values of the model itself, whose Identity nodes stay.
    """
    names: dict[str, str] = {}
    for node in graph.nodes:
        if node.op_type == "Identity" and node.output[0] not in own:
            names[node.output[0]] = names.get(node.input[0], node.input[0])
    graph.set_nodes(node for node in graph.nodes if names.keys().isdisjoint(node.output))
    rename(graph.nodes, names)


def _derived(graph: Graph, request: GradientRequest, training: Training) -> list[Node]:
    """Return the nodes that compute the outputs of a Gradient node, except for outputs with an empty name."""
    op = Op(graph)
    op.role = "backward"
    op.scope = request.node.name
    asked = {x: output for x, output in zip(request.xs, request.node.output, strict=False) if output}
    found = differentiate(graph, {request.y: op.fill(1.0, op.val(request.y))}, asked, op, training)
    op.forward, op.scope = "", request.node.name
    op.rename_all({output: or_zero(op, x, found[x], training) for x, output in asked.items()})
    graph.types.update((output, graph.types[x]) for x, output in asked.items())
    return op.nodes


class GradientRequest:
    """The tensors of a Gradient node, after `read_what_is_named` has added the tensors that it names to its inputs.

    Attributes:
        node: the node; its inputs are `fed`, then `named`, then `y`.
        what: a text that identifies the node in messages.
        fed: the tensors whose values are the point at which the derivative is taken.
        named: the tensors of xs, then those of zs. The tensors in `fed`, in the same order, replace them.
        xs: the tensors of `named` with respect to which the derivative is taken.
        y: the tensor that is differentiated.
    """

    def __init__(self, node: Node) -> None:
        self.node = node
        self.what = _what(node)
        xs, zs, _ = xs_zs_y(node)
        count = len(xs) + len(zs)
        self.fed = list(node.input[:count])
        self.named = list(node.input[count:-1])
        self.xs = self.named[: len(xs)]
        self.y = node.input[-1]

    def check(self, graph: Graph) -> None:
        """Check that the tensors that the node names and is fed allow a derivative.

        Raises:
            UsageError: a tensor of xs or y is not a float tensor. Or a fed tensor differs in type or rank from the
                tensor that it replaces. Or a named tensor depends on another named tensor. Or y depends on an input
                that is not named.
            UnsupportedError: the type of a tensor on which y or xs depend is unknown.
        """
        self._check_typed(graph)
        for attribute, names in (("xs", self.xs), ("y", [self.y])):
            for name in names:
                if not is_float(graph.types.get(name)):
                    hint = "put the name in zs instead" if attribute == "xs" else "use a float tensor"
                    message = f"{self.what}: '{name}' in {attribute} is {_type(graph, name)}"
                    raise errors.wrong_type(f"{message}, but only float tensors have a derivative", hint)
        for name, value in zip(self.named, self.fed, strict=True):
            if not _fits(graph, name, value):
                message = f"{self.what}: the value '{value}', {_type(graph, value)}, is passed for '{name}'"
                raise errors.wrong_type(f"{message}, {_type(graph, name)}", "pass a tensor of the same type and rank")
        self._check_independent(graph)
        fed = set(graph.input_names).difference(graph.initializers, self.named)
        missing = sorted(fed & graph.ancestors([self.y], self.named))
        if missing:
            others = listed(missing, len(missing))
            message = f"{self.what}: '{self.y}' also depends on {others}, which neither xs nor zs contains"
            hint = "add each input that it depends on to xs (for its gradient) or to zs, and to the inputs of the node"
            raise errors.missing_value(message, hint)

    def _check_typed(self, graph: Graph) -> None:
        needed = graph.ancestors([self.y, *self.xs])
        for node in graph.nodes if not {self.y, *self.xs} <= graph.types.keys() else ():
            untyped = [name for name in node.output if name in needed and name not in graph.types]
            if untyped:
                kind = "::".join(filter(None, (node.domain, node.op_type)))
                refusal = Refusal(node.name, kind, f"the type of its output '{untyped[0]}' is unknown")
                raise UnsupportedError(f"{self.what} can't be expanded:", [refusal])

    def _check_independent(self, graph: Graph) -> None:
        named = set(self.named)
        makers = [node for node in graph.nodes if named.intersection(node.output)]
        if not named & graph.ancestors(name for node in makers for name in reads(node)):
            return
        for node in makers:
            above = sorted(named & graph.ancestors(reads(node)))
            if above:
                name = next(output for output in node.output if output in named)
                message = f"{self.what}: '{name}' is computed from {listed(above)}, but xs and zs contain both"
                raise errors.conflict(message, f"leave out '{name}' or {listed(above)}: they must be independent")


def _what(node: Node) -> str:
    return f"Gradient '{node.name or next(filter(None, node.output), '')}'"


def _type(graph: Graph, name: str) -> str:
    return in_words(graph.types.get(name)) or "of unknown type"


def _fits(graph: Graph, name: str, value: str) -> bool:
    wanted, given = graph.types.get(name), graph.types.get(value)
    ranks = {len(shape) for shape in (shape_of(wanted), shape_of(given)) if shape is not None}
    return dtype_of(wanted) == dtype_of(given) and len(ranks) < 2


def read_what_is_named(graph: Graph) -> None:
    """Add to the inputs of each Gradient node, in the model and in its functions, the tensors that the node names.

    The inputs are then the fed tensors, followed by the named tensors of xs and zs, and by y.

    Raises:
        UsageError: a name is unknown or appears twice, or the numbers of inputs or outputs don't match the names.
        UnsupportedError: a node is in the body of another node, or a function gets the names from its caller.
    """
    proto = graph.proto
    given = [*graph.input_names, *graph.initializers, *(s.values.name for s in proto.graph.sparse_initializer)]
    _mark(graph.nodes, given, "the model")
    for function in proto.functions:
        if _mark(function.node, function.input, f"function '{function.name}'"):
            _own_inputs(function)


def _mark(nodes: Iterable[Node], given: Sequence[str], where: str) -> bool:
    """Add to the inputs of each Gradient among the nodes the tensors that it names.

    Args:
        nodes: the nodes of a graph or a function.
        given: the names of the inputs and stored tensors of that graph or function.
        where: the name of the graph or function, for messages.

    Returns:
        True if there is a Gradient node among the nodes.
    """
    nodes = list(nodes)
    for node in nodes:
        for inner in with_bodies(each for body in subgraphs(node) for each in body.node):
            if is_gradient(inner):
                message = f"{_what(inner)} can't be expanded inside the body of '{node.name or node.op_type}'"
                raise UnsupportedError(message, hint="move it out of the body, after that node")
    known = dict.fromkeys([*given, *(name for node in nodes for name in node.output if name)])
    found = [node for node in nodes if is_gradient(node)]
    for node in found:
        _check_names(node, known, where)
        xs, zs, y = xs_zs_y(node)
        node.input.extend([*xs, *zs, y])
    return bool(found)


def _check_names(node: Node, known: Iterable[str], where: str) -> None:
    """Raise an error unless a Gradient node names existing tensors, each once, and is fed one tensor for each."""
    what, (xs, zs, y) = _what(node), xs_zs_y(node)
    if any(attribute.ref_attr_name for attribute in node.attribute):
        message = f"{what} in {where} uses names from the caller of the function"
        raise UnsupportedError(message, hint="use names of the function's own tensors")
    for name in (*xs, *zs, y):
        if name not in known:
            message = f"{what} refers to '{name}', but {where} has no such tensor"
            raise errors.unknown_name(message, errors.suggest(name, known, "tensors"))
    named = [*xs, *zs]
    if twice := [name for name, count in Counter(named).items() if count > 1]:
        message = f"{what} contains {listed(twice)} more than once in xs and zs"
        raise errors.wrong_value(message, "list each tensor once, in xs or in zs")
    if len(node.input) != len(named) or not all(node.input):
        message = f"{what} has {len(list(filter(None, node.input)))} inputs, but {len(named)} names in xs and zs"
        raise errors.wrong_shape(message, "pass one input for each name: those of xs first, then those of zs")
    if not xs or len(node.output) > len(xs):
        message = f"{what} has {len(node.output)} outputs, but {len(xs)} names in xs"
        raise errors.wrong_shape(message, "give the node one output for each name in xs, in the same order")


def _own_inputs(function: FunctionProto) -> None:
    """Insert into a function a copy of each of its inputs that its Gradient nodes name, and read the copy instead.

    The named tensors then stay separate even if a caller passes the same tensor for several inputs.
    """
    named = {name for node in function.node if is_gradient(node) for name in GradientRequest(node).named}
    taken = {*function.input, *(name for node in with_bodies(function.node) for name in node.output)}
    names = {
        name: next(own for i in itertools.count() if (own := f"{name}_{i}") not in taken)
        for name in function.input
        if name in named
    }
    copies = [make_node("Identity", [old], [new], name=f"{new}/Identity") for old, new in names.items()]
    rename(function.node, names)
    write([*copies, *function.node], function.node)
