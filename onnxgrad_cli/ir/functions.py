"""The local functions of a model: their keys, and the number of nodes that inlining them would create."""

from __future__ import annotations

from collections.abc import Iterable

from onnx import FunctionProto

from onnxgrad_cli.errors import OnnxgradError, unreadable
from onnxgrad_cli.ir.domains import plain_domain
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.node_values import with_bodies

Key = tuple[str, str, str]
"""Key of a function: its domain, name and overload."""

MOST_NODES, GROWTH = 10_000, 100
"""After inlining, a model may have MOST_NODES nodes, or GROWTH nodes per node that the file stores, if that is more.

10,000 nodes take seconds. Without a limit, a file of 16 KB with 23 functions, each of which calls the previous function
twice, would become eight million nodes. onnxruntime would inline them too when it loads the model.
"""

DEEPEST = 100
"""Largest depth of nested function calls. It is also the limit of onnx's checker."""


def key_of(function: FunctionProto) -> Key:
    """Return the key of a function."""
    return plain_domain(function.domain), function.name, function.overload


def called_by(node: Node) -> Key:
    """Return the key of the function that a node would call. The model need not contain this function."""
    return plain_domain(node.domain), node.op_type, node.overload


def name_of(key: Key) -> str:
    """Return a function's name for messages, as 'domain::name'."""
    return "::".join(part for part in key if part)


def check_growth(functions: Iterable[FunctionProto], nodes: Iterable[Node]) -> None:
    """Check that inlining the functions of a model would not create too many nodes.

    Raises:
        OnnxgradError: there would be too many nodes, or calls are nested too deep.
    """
    known = {key_of(function): function for function in functions}
    nodes = list(with_bodies(nodes))
    stored = len(nodes) + sum(len(function.node) for function in known.values())
    sizes: dict[Key, int] = {}
    found = _written_out(nodes, known, 0, sizes)
    most = max(MOST_NODES, GROWTH * stored)
    if found > most:
        key = max(sizes, key=lambda each: sizes[each])
        what = f"inlining the model's functions would create {found:,} nodes, more than {most:,}"
        what = f"{what}; one call of '{name_of(key)}' has {sizes[key]:,}"
        raise OnnxgradError(what, "if this size is intended, inline the functions first with onnx.inliner")


def _written_out(nodes: Iterable[Node], known: dict[Key, FunctionProto], depth: int, sizes: dict[Key, int]) -> int:
    """Return the number of nodes after inlining all functions, and store the number for each function in `sizes`."""
    total = 0
    for node in with_bodies(nodes):
        key = called_by(node)
        if key not in known:
            total += 1
            continue
        if depth > DEEPEST:
            what = f"function '{name_of(key)}' is nested in {DEEPEST} calls of functions"
            raise unreadable(what, "correct the model: it is not a valid ONNX model")
        if key not in sizes:
            sizes[key] = _written_out(known[key].node, known, depth + 1, sizes)
        total += sizes[key]
    return total
