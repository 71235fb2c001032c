"""The origin of a model's tensors, as far as its file states it: parameters, buffers or literals of the program."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from onnx import ModelProto

SIGNATURE, FOLDED = "graph_signature", "folded_from"
"""Suffixes of the metadata keys of PyTorch's newer exporter.

The first key lists the inputs and tensors of a model with their kinds. The second lists the tensors from which a tensor
was computed.
"""

MEMBER = re.compile(r"(PARAMETER|BUFFER|CONSTANT_TENSOR) target='([^']+)'")
"""Pattern of an entry in the graph signature, such as "p_fc_weight: PARAMETER target='fc.weight'"."""


@dataclass(frozen=True)
class Provenance:
    """The origin of a model's tensors, read from the file before any change to the model.

    Attributes:
        learned: tensors that are parameters, or were computed from parameters.
        fixed: tensors that are not parameters according to the exporter: buffers, constants, and tensors computed only
            from these.
        literals: tensors of Constant nodes.
        by_pytorch: True if PyTorch's exporter wrote the file.
    """

    learned: frozenset[str] = frozenset()
    fixed: frozenset[str] = frozenset()
    literals: frozenset[str] = frozenset()
    by_pytorch: bool = False


def provenance(model: ModelProto) -> Provenance:
    """Return the origin of a model's tensors."""
    signatures = (entry.value for entry in model.graph.metadata_props if entry.key.endswith(SIGNATURE))
    kinds = {name: kind for text in signatures for kind, name in MEMBER.findall(text)}
    parameters = {name for name, kind in kinds.items() if kind == "PARAMETER"}
    learned, fixed = set(parameters), set(kinds) - parameters
    for name, sources in _folded(model):
        if kinds and name not in kinds:
            (fixed if parameters.isdisjoint(sources) else learned).add(name)
    literals = (node.output[0] for node in model.graph.node if node.op_type == "Constant")
    pytorch = model.producer_name == "pytorch"
    return Provenance(frozenset(learned), frozenset(fixed), frozenset(literals), pytorch)


def _folded(model: ModelProto) -> Iterator[tuple[str, list[str]]]:
    """Yield each value that the exporter computed, with all tensors it was computed from, directly or indirectly."""
    for value in model.graph.value_info:
        for entry in value.metadata_props:
            if entry.key.endswith(FOLDED):
                try:
                    yield value.name, [str(source) for source in ast.literal_eval(entry.value)]
                except (SyntaxError, TypeError, ValueError):  # not the format that PyTorch writes: ignore the entry
                    continue
