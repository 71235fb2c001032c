"""Train duplicates of a weight as one weight (tie), or split a weight that several modules read (untie).

If an embedding and the last layer of a PyTorch model share a matrix, exporters store it twice: once directly and once
transposed. On the other hand, exporters store equal weights only once. So a file does not say whether the program
shared a weight or had several equal ones.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from onnx import TensorProto

from onnxgrad_cli.errors import conflict
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.modules import known_as, module_path
from onnxgrad_cli.ir.node import Node, make_node
from onnxgrad_cli.ir.types import is_float
from onnxgrad_cli.passes.parameters.constants import ConstantRoles
from onnxgrad_cli.passes.parameters.formulas import values_of
from onnxgrad_cli.passes.parameters.patterns import matching
from onnxgrad_cli.record import ParameterRecord

SAMPLED = 16
"""Number of entries of two tensors that are compared first, before all entries are compared."""


class DuplicateWeight(NamedTuple):
    """A weight with the same values as an earlier weight. `transposed` is True if it holds them transposed."""

    name: str
    of: str
    transposed: bool


def twins(graph: Graph, names: Iterable[str]) -> list[DuplicateWeight]:
    """Return the weights with the values of an earlier weight. Weights whose elements are all equal are left out."""
    folder = graph.path.parent if graph.path else None
    tensors = {name: graph.initializers[name] for name in names}
    counts = Counter(map(_form, tensors.values()))
    firsts: dict[Hashable, list[str]] = defaultdict(list)
    found: list[DuplicateWeight] = []
    for name, tensor in tensors.items():
        array = values_of(tensor, folder) if counts[_form(tensor)] > 1 else None
        if array is None or array.size < 2:
            continue
        entries = array.diagonal() if array.ndim == 2 else array.reshape(-1)  # a transpose has the same diagonal
        others = firsts[_form(tensor), entries[:SAMPLED].tobytes()]
        if others and array.min() < array.max():
            for other in others:
                before = values_of(tensors[other], folder)
                if before is not None and (np.array_equal(array, before) or np.array_equal(array, before.T)):
                    found.append(DuplicateWeight(name, other, not np.array_equal(array, before)))
                    break
            else:
                others.append(name)
        elif not others:
            others.append(name)
    return found


def _form(tensor: TensorProto) -> Hashable:
    """Return a key of a tensor: its type and sizes. A matrix and its transpose have the same key."""
    return tensor.data_type, tuple(sorted(tensor.dims) if len(tensor.dims) == 2 else tensor.dims)


def tie(graph: Graph, patterns: Sequence[str], training: ParameterRecord) -> None:
    """Replace weights that match `patterns` by earlier weights with equal values, and record this in `training`.

    A pattern may match either of two equal weights, or a module that reads one.

    Raises:
        UsageError: a pattern matches no weight that has the same values as another one.
    """
    roles = ConstantRoles(graph)
    weights = [n for n in graph.initializers if is_float(graph.types[n]) and not graph.added(n) and not roles.reason(n)]
    found = {twin.name: twin for twin in twins(graph, weights)}
    names = known_as(graph.nodes, {*found, *(twin.of for twin in found.values())})
    known = {name: {twin.of, *names[name], *names[twin.of]} for name, twin in found.items()}
    chosen = [found[n] for n in matching(patterns, list(found), "`tie`", "equal weights", known)]
    written = []
    for twin in chosen:
        op_type, settings = ("Transpose", {"perm": [1, 0]}) if twin.transposed else ("Identity", {})
        written.append(make_node(op_type, [twin.of], [twin.name], name=twin.name, **settings))
        graph.remove_initializer(twin.name)
    graph.set_nodes([*written, *graph.nodes])
    training.copies.update((twin.name, twin.of) for twin in chosen)
    training.transposed += [twin.name for twin in chosen if twin.transposed]


def owners_of(graph: Graph, names: Collection[str]) -> dict[str, list[str]]:
    """Return a map from each weight to the modules that read it (or other names of the weight), in graph order.

    Weights that a single node reads are left out.
    """
    readers: dict[str, list[Node]] = {name: [] for name in names}
    for node in graph.nodes:
        for name in dict.fromkeys(node.input):
            if name in readers:
                readers[name].append(node)

    def owner(node: Node) -> str:
        return node.output[0] if node.op_type == "Identity" else module_path(node)

    return {name: list(dict.fromkeys(filter(None, map(owner, own)))) for name, own in readers.items() if len(own) > 1}


def untie(graph: Graph, patterns: Sequence[str]) -> None:
    """Give each module its own copy of the weights that match `patterns`. The first module keeps the weight itself.

    If the name that a module uses for the weight is known, the copy gets that name. Otherwise, the name consists of the
    module's path and the last part of the weight's name.

    Raises:
        UsageError: a pattern matches no weight, or only weights that a single module reads; or the model has
            derivatives.
    """
    if graph.derived:
        raise conflict(
            "`untie`: the derivatives in the model read the shared weights too, and would not use the copies",
            "leave `untie` out",
        )
    floats = [name for name in graph.initializers if is_float(graph.types[name]) and not graph.added(name)]
    owners, roles = owners_of(graph, floats), ConstantRoles(graph)
    shared = [name for name in floats if len(owners.get(name, ())) > 1 and not roles.reason(name)]
    for name in matching(patterns, shared, "`untie`", "shared weights"):
        _part(graph, name, owners[name])


def _part(graph: Graph, name: str, owners: Sequence[str]) -> None:
    """Copy a weight for each of its owners but one: the module that it is named after, or else the first module."""
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
    """Return True if a node is an Identity of the weight `name`: an exporter merged another weight with it."""
    return node.op_type == "Identity" and name in node.input
