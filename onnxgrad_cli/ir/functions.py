"""The functions of a model: who calls which, and how many nodes they are where all of them are written out."""

from __future__ import annotations

from collections.abc import Iterable

from onnx import FunctionProto

from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.ir.domains import plain_domain
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.nodes import with_bodies

Key = tuple[str, str, str]
"""The domain, the name and the overload of a function."""

MOST_NODES, GROWTH = 10_000, 100
"""Nodes that any functions may become, which take seconds, and how many for each node that is stored: of 23 functions
that each call the one before twice, 16 KB, eight million would come, here and in onnxruntime, which writes them out as
it loads."""

DEEPEST = 100
"""Calls in one another, as onnx's checker has it."""


def key_of(function: FunctionProto) -> Key:
    """What a function is called by."""
    return plain_domain(function.domain), function.name, function.overload


def called_by(node: Node) -> Key:
    """The function that a node calls, if the model has it."""
    return plain_domain(node.domain), node.op_type, node.overload


def name_of(key: Key) -> str:
    """A function in words, as 'domain::name'."""
    return "::".join(part for part in key if part)


def check_growth(functions: Iterable[FunctionProto], nodes: Iterable[Node]) -> None:
    """Refuse functions that call each other so often that their nodes would fill the memory.

    Raises:
        OnnxgradError: so they do, or one calls itself.
    """
    known = {key_of(function): function for function in functions}
    if not known:
        return
    nodes = list(with_bodies(nodes))
    stored = len(nodes) + sum(len(function.node) for function in known.values())
    sizes: dict[Key, int] = {}
    found = _written_out(nodes, known, (), sizes)
    most = max(MOST_NODES, GROWTH * stored)
    if found > most:
        key = max(sizes, key=lambda each: sizes[each])
        raise OnnxgradError(
            f"the functions of the model, written out, are {found:,} nodes, of which a call of '{name_of(key)}' is "
            f"{sizes[key]:,}; at most {most:,} are written out",
            "where that is meant, write them out before, by onnx.inliner",
        )


def _written_out(
    nodes: Iterable[Node], known: dict[Key, FunctionProto], callers: tuple[Key, ...], sizes: dict[Key, int]
) -> int:
    """How many nodes there are where no function is called any more; `sizes` gets those of each function."""
    total = 0
    for node in with_bodies(nodes):
        key = called_by(node)
        if key not in known:
            total += 1
            continue
        if key in callers or len(callers) > DEEPEST:
            what = "calls itself" if key in callers else f"is called {DEEPEST} functions deep"
            raise OnnxgradError(f"function '{name_of(key)}' {what}", "it is not a valid ONNX model")
        if key not in sizes:
            sizes[key] = _written_out(known[key].node, known, (*callers, key), sizes)
        total += sizes[key]
    return total
