"""Weights that an exporter has written twice, transposed perhaps: found by their values, and trained as one.

PyTorch's exporters store the matrix of an embedding once as it is and once transposed, if the last layer shares it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from onnx import TensorProto

from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.modules import known_as
from onnxgrad_cli.ir.node import make_node
from onnxgrad_cli.ir.types import is_float
from onnxgrad_cli.passes.parameters.constants import ConstantRoles
from onnxgrad_cli.passes.parameters.formulas import values_of
from onnxgrad_cli.passes.parameters.patterns import matching
from onnxgrad_cli.record import ParameterRecord

SAMPLED = 16
"""Entries of a tensor that are compared before all are."""


class Twin(NamedTuple):
    """A weight with the values of one that is stored before it, and whether it holds them transposed."""

    name: str
    of: str
    transposed: bool


def twins(graph: Graph, names: Iterable[str]) -> list[Twin]:
    """Return the weights that have the values of another one, except weights of a single value throughout."""
    folder = graph.path.parent if graph.path else None
    tensors = {name: graph.initializers[name] for name in names}
    counts = Counter(map(_form, tensors.values()))
    firsts: dict[Hashable, list[str]] = defaultdict(list)
    found: list[Twin] = []
    for name, tensor in tensors.items():
        array = values_of(tensor, folder) if counts[_form(tensor)] > 1 else None
        if array is None or array.size < 2:
            continue
        entries = array.diagonal() if array.ndim == 2 else array.reshape(-1)  # the same in the transposed one
        others = firsts[_form(tensor), entries[:SAMPLED].tobytes()]
        if others and array.min() < array.max():
            for other in others:
                before = values_of(tensors[other], folder)
                if before is not None and (np.array_equal(array, before) or np.array_equal(array, before.T)):
                    found.append(Twin(name, other, not np.array_equal(array, before)))
                    break
            else:
                others.append(name)
        elif not others:
            others.append(name)
    return found


def _form(tensor: TensorProto) -> Hashable:
    """The type and the sizes of a tensor; of a matrix in either order."""
    return tensor.data_type, tuple(sorted(tensor.dims) if len(tensor.dims) == 2 else tensor.dims)


def tie(graph: Graph, patterns: Sequence[str], training: ParameterRecord) -> None:
    """Let one weight stand for those of equal values that match `patterns`, and `training` note what it stands for.

    Either weight can be named, or a module that reads it.

    Raises:
        UsageError: a pattern matches no weight whose values another one has.
    """
    if not patterns:
        return
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
        training.copies[twin.name] = twin.of
        if twin.transposed:
            training.transposed.append(twin.name)
    graph.set_nodes([*written, *graph.nodes])
