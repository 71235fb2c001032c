"""Where a model's tensors come from, as far as its file says: parameters, buffers, literals."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from onnx import ModelProto

SIGNATURE, FOLDED = "graph_signature", "folded_from"
"""What PyTorch's newer exporter calls, after a prefix, a model's inputs and tensors, and a tensor's ingredients."""

MEMBER = re.compile(r"(PARAMETER|BUFFER|CONSTANT_TENSOR) target='([^']+)'")
"""A tensor in that signature: "p_fc_weight: PARAMETER target='fc.weight'"."""


@dataclass(frozen=True)
class Provenance:
    """What a file says of its tensors, read before anything is done to it.

    Attributes:
        learned: tensors that are parameters, or were computed of some.
        fixed: tensors that are none, as the exporter says: buffers, constants, and what was computed of such.
        literals: tensors that stand in Constant nodes.
        by_pytorch: whether PyTorch's exporter wrote the file.
    """

    learned: frozenset[str] = field(default=frozenset())
    fixed: frozenset[str] = field(default=frozenset())
    literals: frozenset[str] = field(default=frozenset())
    by_pytorch: bool = False


def provenance(model: ModelProto) -> Provenance:
    """What a file says of its tensors."""
    kinds = {name: kind for text in _signatures(model) for kind, name in MEMBER.findall(text)}
    parameters = {name for name, kind in kinds.items() if kind == "PARAMETER"}
    learned, fixed = set(parameters), set(kinds) - parameters
    for name, sources in _folded(model):
        if kinds and name not in kinds:
            (fixed if parameters.isdisjoint(sources) else learned).add(name)
    literals = (node.output[0] for node in model.graph.node if node.op_type == "Constant")
    pytorch = model.producer_name == "pytorch"
    return Provenance(frozenset(learned), frozenset(fixed), frozenset(literals), pytorch)


def _signatures(model: ModelProto) -> Iterator[str]:
    return (entry.value for entry in model.graph.metadata_props if entry.key.endswith(SIGNATURE))


def _folded(model: ModelProto) -> Iterator[tuple[str, list[str]]]:
    """The values that the exporter computed, each with all that went into it, directly or not."""
    for value in model.graph.value_info:
        for entry in value.metadata_props:
            if entry.key.endswith(FOLDED):
                try:
                    yield value.name, [str(source) for source in ast.literal_eval(entry.value)]
                except (SyntaxError, TypeError, ValueError):  # not as PyTorch writes it: it says nothing
                    continue
