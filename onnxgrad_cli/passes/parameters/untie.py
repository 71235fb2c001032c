"""Part weights that several modules read: each gets its own, of the same values.

A file does not say whether its program shared a weight or had several that were equal, which PyTorch's exporters write
once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.modules import module_path
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.types import is_float
from onnxgrad_cli.passes.parameters.constants import ConstantRoles
from onnxgrad_cli.passes.parameters.patterns import matching


def owners_of(graph: Graph, names: Collection[str]) -> dict[str, list[str]]:
    """The modules that read a weight, or the other names that it has, in the order of the graph.

    Of weights that a single node reads, nothing is said.
    """
    readers: dict[str, list[Node]] = {name: [] for name in names}
    for node in graph.nodes:
        for name in dict.fromkeys(node.input):
            if name in readers:
                readers[name].append(node)
    return {
        name: list(dict.fromkeys(filter(None, map(_owner, nodes)))) for name, nodes in readers.items() if len(nodes) > 1
    }


def _owner(node: Node) -> str:
    """The other name that a node gives to what it reads, or the module that it lies in."""
    return node.output[0] if node.op_type == "Identity" else module_path(node)


def untie(graph: Graph, patterns: Sequence[str]) -> None:
    """Give each module its own copy of the weights that match `patterns`; the first keeps the weight itself.

    A copy is called as the module calls it where that is known, else by the module's path and the weight's last name.

    Raises:
        UsageError: a pattern matches no weight, or none that is read by several modules; or the model has derivatives.
    """
    if not patterns:
        return
    if graph.derived:
        raise UsageError(
            "`untie`: derivatives in the model read its weights, too, and would not follow the copies",
            "leave `untie` out",
        )
    floats = [name for name in graph.initializers if is_float(graph.types[name]) and not graph.added(name)]
    owners, roles = owners_of(graph, floats), ConstantRoles(graph)
    shared = [name for name in floats if len(owners.get(name, ())) > 1 and not roles.reason(name)]
    for name in matching(patterns, shared, "`untie`", "shared weights"):
        _part(graph, name, owners[name])


def _part(graph: Graph, name: str, owners: Sequence[str]) -> None:
    """Make a copy of a weight for each owner but one: that whose name it bears, or the first module."""
    merged = {node.output[0]: node for node in graph.nodes if _renames(node, name)}
    modules = [owner for owner in owners if owner not in merged]
    keeps = next((owner for owner in modules if name.startswith(f"{owner}.")), next(iter(modules), ""))
    copies = {owner: graph.fresh(f"{owner}.{name.rpartition('.')[2]}") for owner in modules if owner != keeps}
    for copy in (*merged, *copies.values()):
        graph.copy_initializer(name, copy)
    graph.set_nodes(node for node in graph.nodes if not _renames(node, name))
    for node in graph.nodes:
        copy = copies.get(module_path(node), name) if name in node.input else name
        node.input[:] = [copy if each == name else each for each in node.input]


def _renames(node: Node, name: str) -> bool:
    """Whether a node says that a weight was merged with the one called `name`."""
    return node.op_type == "Identity" and name in node.input
