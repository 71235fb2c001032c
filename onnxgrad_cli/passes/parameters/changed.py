"""Refuse to train a model that contains derivatives if another tool has folded, merged or renamed its tensors.

For example, a simplifier computes `Transpose(W)` of the derivative once and stores the result. Training then changes W
but not the stored copy, and the derivative no longer belongs to the model.
"""

from __future__ import annotations

from dataclasses import replace

from onnxgrad_cli.errors import UnsupportedError
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.provenance import provenance
from onnxgrad_cli.metadata import TENSORS, ModelTensors, read_tensors, stored_floats

HINT = (
    "run the other tool on the model without derivatives, then add them again with `onnxgrad derive` or "
    f"`onnxgrad expand`; if you added the tensors yourself, remove the entry '{TENSORS}' from the model's "
    "metadata"
)


def read_record(graph: Graph) -> None:
    """Read the file's record of its tensors into `provenance`, `computed`, `derived` and `changed` of a graph."""
    graph.provenance = provenance(graph.proto)
    record = read_tensors(graph.proto)
    if record is not None:
        graph.provenance = replace(graph.provenance, literals=graph.provenance.literals.union(record.literals))
        graph.derived, graph.computed = True, frozenset(record.computed)
        graph.changed = _changed(graph, record)


def _changed(graph: Graph, record: ModelTensors) -> str:
    """Describe the first tensor that another tool changed after onnxgrad added derivatives; "" if there is none."""
    stored = [tensor.name for tensor in stored_floats(graph.proto)]
    new = next((name for name in stored if name not in record.names and not graph.added(name)), None)
    if new is not None:
        return f"'{new}' is new; if it was computed from weights, it would keep its value while these are trained"
    merged = next((name for name, constant in record.equal.items() if not {name, constant}.issubset(stored)), None)
    if merged is not None:
        return f"'{merged}' was merged with a constant of the derivative that had the same value"
    return ""


def refuse_changed(graph: Graph) -> None:
    """Refuse derivatives with respect to weights if the model has older derivatives and another tool changed tensors.

    Raises:
        UnsupportedError: another tool changed the model's tensors.
    """
    if graph.changed:
        text = f"another tool has changed the model since derivatives were added: {graph.changed}"
        raise UnsupportedError(text, hint=HINT)
