"""Refuse to train a model of derivatives whose tensors another tool has folded, merged or renamed.

A simplifier computes `Transpose(W)` of the derivative once and stores the result. Training then moves W, the stored
copy stays, and the derivative is no longer that of the model.
"""

from __future__ import annotations

from dataclasses import replace

from onnxgrad_cli.errors import UnsupportedError
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.provenance import provenance
from onnxgrad_cli.metadata import TENSORS, ModelTensors, read_tensors, stored_floats

HINT = (
    "run the other tool on the model that the derivatives were made from, then make them again with `onnxgrad derive` "
    f"or `onnxgrad expand`; if the tensors are your own, remove the entry '{TENSORS}' from the model's metadata"
)


def read_record(graph: Graph) -> None:
    """Set `provenance`, `computed`, `derived` and `changed` of a graph from what the file says of its tensors."""
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
        return f"'{new}' is new, and if it was computed from weights it would keep its value while these are trained"
    merged = next((name for name, constant in record.equal.items() if not {name, constant}.issubset(stored)), None)
    if merged is not None:
        return f"'{merged}' was merged with a constant of the derivative that had the same value"
    return ""


def refuse_changed(graph: Graph) -> None:
    """Refuse to differentiate a model of derivatives with respect to weights after another tool changed it.

    Raises:
        UnsupportedError: another tool changed its tensors.
    """
    if graph.changed:
        text = f"another tool has changed the model since derivatives were added: {graph.changed}"
        raise UnsupportedError(text, hint=HINT)
