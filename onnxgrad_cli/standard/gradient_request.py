"""What a Gradient node asks: the tensors it names, the values it is fed, and whether the two make sense.

It names the tensors between which it differentiates in attributes, where no other part of an ONNX tool looks. So each
node first reads what it names as inputs too; then order, renaming and removal of nodes are right by themselves.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from onnx import FunctionProto, GraphProto

from onnxgrad_cli.errors import Refusal, UnsupportedError, UsageError, suggest
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node, make_node, messages
from onnxgrad_cli.ir.nodes import reads, subgraphs, with_bodies
from onnxgrad_cli.ir.renaming import rename
from onnxgrad_cli.ir.types import dtype_of, in_words, is_float, shape_of
from onnxgrad_cli.passes.gradient_op import is_gradient, xs_zs_y


class Request:
    """What a Gradient node asks that reads what it names.

    Attributes:
        node: the node; its inputs are `fed`, `named` and `y`, one after the other.
        what: what to call it in a message.
        fed: the values at which it differentiates.
        named: the tensors that stand for them, those of xs first.
        xs: those of them with respect to which it differentiates.
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
        """Refuse what has no derivative, what does not fit, and what is not independent or not complete.

        Raises:
            UsageError: it is one of those.
            UnsupportedError: the type of something is unknown.
        """
        self._check_typed(graph)
        for attribute, names in (("xs", self.xs), ("y", [self.y])):
            for name in names:
                if not is_float(graph.types.get(name)):
                    raise UsageError(
                        f"{self.what}: '{name}' in {attribute} is {_type(graph, name)}, and only float tensors have "
                        "a derivative",
                        "name it in zs instead" if attribute == "xs" else "name a float tensor",
                    )
        for name, value in zip(self.named, self.fed, strict=True):
            if not _fits(graph, name, value):
                raise UsageError(
                    f"{self.what}: '{value}', {_type(graph, value)}, is fed as '{name}', {_type(graph, name)}",
                    "feed a tensor of that type and rank",
                )
        self._check_independent(graph)
        missing = sorted(set(_fed_inputs(graph)) & graph.ancestors([self.y], self.named) - set(self.named))
        if missing:
            raise UsageError(
                f"{self.what}: '{self.y}' also depends on {_listed(missing)}, which neither xs nor zs names",
                "name each input it depends on: in xs for its gradient, else in zs; and feed it to the node",
            )

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
                raise UsageError(
                    f"{self.what}: '{name}' is computed from {_listed(above)}, and xs and zs name both",
                    f"the named tensors must be independent: leave out '{name}' or {_listed(above)}",
                )


def _what(node: Node) -> str:
    return f"Gradient '{node.name or next(filter(None, node.output), '')}'"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def _type(graph: Graph, name: str) -> str:
    return in_words(graph.types.get(name)) or "of unknown type"


def _fits(graph: Graph, name: str, value: str) -> bool:
    wanted, given = graph.types.get(name), graph.types.get(value)
    ranks = {len(shape) for shape in (shape_of(wanted), shape_of(given)) if shape is not None}
    return dtype_of(wanted) == dtype_of(given) and len(ranks) < 2


def _fed_inputs(graph: Graph) -> Iterator[str]:
    return (name for name in graph.input_names if name not in graph.initializers)


def read_what_is_named(graph: Graph) -> None:
    """Let every Gradient of a model, those of its functions too, read what it names: see `Request`.

    Raises:
        UsageError: a name is unknown or stands twice, or there are not as many inputs or outputs as names.
        UnsupportedError: a node stands in the body of another, or takes names from the caller of a function.
    """
    proto = graph.proto
    given = [*graph.input_names, *graph.initializers, *(s.values.name for s in proto.graph.sparse_initializer)]
    _mark(graph.nodes, given, "the model")
    for function in proto.functions:
        if _mark(function.node, function.input, f"function '{function.name}'"):
            _own_inputs(function)


def _mark(nodes: Iterable[Node], given: Sequence[str], where: str) -> bool:
    """Let every Gradient among the nodes of a graph, whose inputs are `given`, read what it names; whether any is."""
    nodes = list(nodes)
    for node in nodes:
        for inner in with_bodies(each for body in subgraphs(node) for each in body.node):
            if is_gradient(inner):
                raise UnsupportedError(
                    f"{_what(inner)} stands in the body of '{node.name or node.op_type}', where it can't be expanded",
                    hint="put it after that node, outside",
                )
    known = dict.fromkeys([*given, *(name for node in nodes for name in node.output if name)])
    found = [node for node in nodes if is_gradient(node)]
    for node in found:
        _check_names(node, known, where)
        xs, zs, y = xs_zs_y(node)
        node.input.extend([*xs, *zs, y])
    return bool(found)


def _check_names(node: Node, known: Iterable[str], where: str) -> None:
    """Make sure that a Gradient node names tensors that there are, each once, and is fed one for each."""
    what, (xs, zs, y) = _what(node), xs_zs_y(node)
    if any(attribute.ref_attr_name for attribute in node.attribute):
        raise UnsupportedError(
            f"{what} in {where} takes what it names from the function's caller", hint="name it there"
        )
    for name in (*xs, *zs, y):
        if name not in known:
            raise UsageError(f"{what} names '{name}', and {where} has no such tensor", suggest(name, known, "tensors"))
    named = [*xs, *zs]
    twice = [name for name in dict.fromkeys(named) if named.count(name) > 1]
    if twice:
        raise UsageError(f"{what} names {_listed(twice)} more than once", "name each tensor once, in xs or in zs")
    if len(node.input) != len(named) or not all(node.input):
        raise UsageError(
            f"{what} is fed {len(list(filter(None, node.input)))} tensors, and names {len(named)} in xs and zs",
            "feed one for each: those of xs first, then those of zs",
        )
    if not xs or len(node.output) > len(xs):
        raise UsageError(
            f"{what} has {len(node.output)} outputs, and {len(xs)} tensors in xs", "it has one for each, in order"
        )


def _own_inputs(function: FunctionProto) -> None:
    """Let the Gradients of a function see its inputs apart, whatever a caller passes: copies of those they name."""
    named = {name for node in function.node if is_gradient(node) for name in Request(node).named}
    taken = {*function.input, *(name for node in with_bodies(function.node) for name in node.output)}
    names = {
        name: next(own for i in itertools.count() if (own := f"{name}_{i}") not in taken)
        for name in function.input
        if name in named
    }
    copies = [make_node("Identity", [old], [new], name=f"{new}/Identity") for old, new in names.items()]
    rename(function.node, names)
    nodes = GraphProto(node=messages([*copies, *function.node])).node
    del function.node[:]
    function.node.extend(nodes)
