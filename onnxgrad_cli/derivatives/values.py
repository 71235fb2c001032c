"""What a user names: outputs, inputs and weights of a model, and any value in between.

A derivative with respect to an inner value is that with respect to something added to it: where it depends on an input
that is asked for too, that input's derivative counts the way through it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence

import onnx

from onnxgrad_cli.errors import UsageError, suggest
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node, make_node
from onnxgrad_cli.ir.nodes import subgraphs
from onnxgrad_cli.ir.types import in_words, is_float
from onnxgrad_cli.passes.parameters.patterns import matches

Chosen = Mapping[str, list[str]]
"""Pattern -> the values that it chooses."""


def choose(
    patterns: str | Sequence[str], known: list[str], graph: Graph, option: str, kind: str
) -> dict[str, list[str]]:
    """What each pattern chooses: of `known`, or else of the inner values, by their names or those of their nodes.

    Args:
        patterns: names or globs, or a single one.
        known: what is sought first.
        graph: an opened model, before anything is done to it.
        option, kind: see `matching`.

    Raises:
        UsageError: a pattern chooses nothing.
    """
    found = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        hits = [name for name in known if matches(name, pattern)] or list(_inner(graph, pattern))
        if not hits:
            reason = _inside(graph, pattern)
            raise UsageError(
                f"{option}: '{pattern}' {reason or f'matches none of the {kind}, and no value in between'}",
                "name a value outside" if reason else _near(pattern, known, graph, kind),
            )
        found[pattern] = hits
    return found


def floats(chosen: Chosen, graph: Graph, option: str, kind: str) -> list[str]:
    """The float values that were chosen, each once, of a typed graph.

    Raises:
        UsageError: of what a pattern chooses nothing is float.
    """
    for pattern, names in chosen.items():
        if not any(is_float(graph.types.get(name)) for name in names):
            known = in_words(graph.types.get(names[0])) or "of unknown type"
            raise UsageError(
                f"{option}: '{pattern}' matches none of the {kind}: '{names[0]}' is {known}", "name a float value"
            )
    return list(dict.fromkeys(name for each in chosen.values() for name in each if is_float(graph.types.get(name))))


def hold(graph: Graph, names: Sequence[str]) -> list[str]:
    """Make outputs of inner values, so that no pass removes them; returns all outputs from before."""
    own = graph.output_names
    declared = {value.name: value for value in graph.proto.graph.value_info}
    for name in dict.fromkeys(names):
        if name not in own:
            graph.proto.graph.output.append(declared.get(name, onnx.ValueInfoProto(name=name)))
    return own


def split(graph: Graph, name: str) -> None:
    """Set an inner value apart from what its node makes, which a rule may read: that does not move with it."""
    for position, node in enumerate(graph.nodes):
        if name in node.output:
            made = graph.fresh(f"{name}_made")
            node.output[:] = [made if output == name else output for output in node.output]
            graph.types[made] = graph.types[name]
            label = graph.fresh(f"{name}/Identity")
            graph.nodes.insert(position + 1, make_node("Identity", [made], [name], name=label))
            return


def _near(name: str, known: list[str], graph: Graph, kind: str) -> str:
    """A hint for a misspelt name: what is sought first, where one of it is near."""
    hint = suggest(name, known, kind)
    inner = difflib.get_close_matches(name, [made for made in graph.made() if made], n=1, cutoff=0.6)
    return hint if hint.startswith("did you mean") or not inner else f"did you mean {inner[0]}?"


def _inner(graph: Graph, pattern: str) -> Iterator[str]:
    """The values in between that a pattern names, or else those of the nodes with one result that it names."""
    made = [name for name in graph.made() if name and matches(name, pattern)]
    yield from made or (node.output[0] for node in graph.nodes if len(node.output) == 1 and matches(node.name, pattern))


def _inside(graph: Graph, name: str) -> str:
    """Why a name can't be meant though the model has it; "" where it has not."""
    if any(node.name == name for node in graph.nodes):
        return "is a node with several results: name one of them"
    for node in graph.nodes:
        if name in _made_inside(node):
            return f"is made in a body of '{node.name or node.output[0]}' ({node.op_type}), each time that this runs"
    for function in graph.proto.functions:
        if any(name in node.output or name in _made_inside(node) for node in function.node):
            return f"is made in the function '{function.name}', at each call"
    return ""


def _made_inside(node: Node) -> set[str]:
    """Every value that the bodies of a node make."""
    nodes = [inner for body in subgraphs(node) for inner in body.node]
    return {name for inner in nodes for name in inner.output}.union(*map(_made_inside, nodes))
