"""Select values of a model by patterns: outputs, inputs, weights, and inner values.

An inner value is a value that a node of the model computes. A derivative with respect to an inner value is the
derivative with respect to a term that is added to it. If an inner value depends on an input that is also selected, the
derivative with respect to the input includes the paths through the inner value.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence

import onnx

from onnxgrad_cli.errors import suggest, unknown_name, wrong_type, wrong_value
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node, make_node
from onnxgrad_cli.ir.node_values import subgraphs
from onnxgrad_cli.ir.types import in_words, is_float
from onnxgrad_cli.passes.parameters.patterns import matches

Chosen = Mapping[str, list[str]]
"""Pattern of the user -> the names of the values that it selects."""


def choose(
    patterns: str | Sequence[str], known: list[str], graph: Graph, option: str, kind: str
) -> dict[str, list[str]]:
    """Return a map from each pattern to the values that it selects.

    If a pattern matches none of `known`, it selects inner values by their names or by the names of their nodes.

    Args:
        patterns: a name or glob pattern, or several.
        known: the names that are searched first.
        graph: an opened model, before any pass has changed it.
        option, kind: the option and the kind of values in `known`, for error messages.

    Raises:
        UsageError: a pattern matches nothing.
    """
    found = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        hits = [name for name in known if matches(name, pattern)] or list(_inner(graph, pattern))
        if not hits:
            if reason := _inside(graph, pattern):
                raise wrong_value(f"{option}: '{pattern}' {reason}", "choose a value of the main graph")
            raise unknown_name(
                f"{option}: '{pattern}' matches none of the {kind}, and no value inside the model",
                _near(pattern, known, graph, kind),
            )
        found[pattern] = hits
    return found


def floats(chosen: Chosen, graph: Graph, option: str, kind: str) -> list[str]:
    """Return the names of the selected float values, without duplicates. The graph's types must be known.

    Raises:
        UsageError: a pattern selects no float value.
    """
    for pattern, names in chosen.items():
        if not any(is_float(graph.types.get(name)) for name in names):
            known = in_words(graph.types.get(names[0])) or "a value of unknown type"
            raise wrong_type(
                f"{option}: '{pattern}' matches none of the {kind}, because '{names[0]}' is {known}",
                "choose a float value",
            )
    return list(dict.fromkeys(name for each in chosen.values() for name in each if is_float(graph.types.get(name))))


def hold(graph: Graph, names: Sequence[str]) -> list[str]:
    """Declare inner values as outputs, so that no pass removes them. Return the outputs that the graph had before."""
    own = graph.output_names
    declared = {value.name: value for value in graph.proto.graph.value_info}
    for name in dict.fromkeys(names):
        if name not in own:
            graph.proto.graph.output.append(declared.get(name, onnx.ValueInfoProto(name=name)))
    return own


def split(graph: Graph, name: str) -> None:
    """Insert an Identity between an inner value and the node that computes it.

    The differentiation rule of that node may read the node's result, which must not change when a term is added to the
    inner value.
    """
    made = graph.fresh(f"{name}_made")
    graph.types[made] = graph.types[name]
    position = take_name(graph, name, made)
    graph.nodes.insert(position, make_node("Identity", [made], [name], name=graph.fresh(f"{name}/Identity")))


def take_name(graph: Graph, name: str, new: str) -> int:
    """Rename a value only where it is computed or stored, so that its old name is free.

    Returns:
        The position of the first node after the one that computes the value; 0 if it is stored.
    """
    for position, node in enumerate(graph.nodes):
        if name in node.output:
            node.output[:] = [new if output == name else output for output in node.output]
            return position + 1
    for tensor in graph.proto.graph.initializer:  # the value may be stored: constants are folded
        if tensor.name == name:
            tensor.name = new
    return 0


def _near(name: str, known: list[str], graph: Graph, kind: str) -> str:
    """Return a hint with names that are similar to a misspelled one: first names in `known`, then inner values."""
    hint = suggest(name, known, kind)
    inner = difflib.get_close_matches(name, [made for made in graph.made() if made], n=1, cutoff=0.6)
    return hint if hint.startswith("did you mean") or not inner else f"did you mean {inner[0]}?"


def _inner(graph: Graph, pattern: str) -> Iterator[str]:
    """Yield the inner values that a pattern matches.

    If it matches no value, yield the results of the nodes whose names it matches, except nodes with several results.
    """
    made = [name for name in graph.made() if name and matches(name, pattern)]
    yield from made or (node.output[0] for node in graph.nodes if len(node.output) == 1 and matches(node.name, pattern))


def _inside(graph: Graph, name: str) -> str:
    """Return the reason why a name that occurs in the model can't be selected, or "" if it doesn't occur."""
    if any(node.name == name for node in graph.nodes):
        return "is a node with several outputs: choose one of them"
    for node in graph.nodes:
        if name in _made_inside(node):
            return f"is computed inside '{node.name or node.output[0]}' ({node.op_type}), each time that its body runs"
    for function in graph.proto.functions:
        if any(name in node.output or name in _made_inside(node) for node in function.node):
            return f"is computed inside the function '{function.name}', at each call"
    return ""


def _made_inside(node: Node) -> set[str]:
    """Return all values that the bodies of a node compute."""
    nodes = [inner for body in subgraphs(node) for inner in body.node]
    return {name for inner in nodes for name in inner.output}.union(*map(_made_inside, nodes))
