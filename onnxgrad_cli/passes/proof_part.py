"""Store what a proof of the loss needs in addition to the training model.

A loss may read only the derivative of a value, and the training model then does not compute the value itself. But a
proof needs the value, to compare the derivative with differences. So the nodes that compute the value are stored in the
metadata, where they cost no time.
"""

from __future__ import annotations

import base64
from dataclasses import replace

from onnx import GraphProto

from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import copied
from onnxgrad_cli.ir.node_values import behind, read_by, reads
from onnxgrad_cli.ir.renaming import rename
from onnxgrad_cli.metadata import PROOF_PREFIX, InnerDerivative, InnerEvaluation
from onnxgrad_cli.record import LossRecord

MAX_BYTES = 2**20
"""Largest size of the stored nodes and constants. A proof leaves out derivatives whose nodes would take more."""


def keep_for_proof(graph: Graph, training: LossRecord) -> None:
    """Copy the nodes that compute the derivatives and evaluations of the loss, before passes remove unused ones.

    Derivatives and evaluations on which the loss does not depend are removed from the record.
    """
    needed = graph.ancestors([training.loss])
    used: list[InnerDerivative] = []
    for each in reversed(training.inner):
        if not needed.isdisjoint(each.results):
            used.append(each)
            needed |= graph.ancestors([each.of, each.seed])
    training.inner = used[::-1]
    training.evaluated = [
        replace(each, outputs=outputs) for each in training.evaluated
        if (outputs := {name: own for name, own in each.outputs.items() if own in needed})
    ]  # fmt: skip
    training.proof_nodes = [copied(node) for node in behind(graph.nodes, _values(training))]
    read = {name for node in training.proof_nodes for name in reads(node)}
    training.proof_constants = {name: graph.initializers[name] for name in read & graph.initializers.keys()}


def _values(training: LossRecord) -> set[str]:
    """Return the values that the record of the derivatives and evaluations names."""
    named = {name for each in training.inner for name in (each.of, each.seed, *each.wrt, *each.results)}
    for each in training.evaluated:
        named.update(*each.inputs.values(), *each.outputs.values())
    return named - {""}


def proof_part(
    graph: Graph, training: LossRecord
) -> tuple[tuple[InnerDerivative, ...], tuple[InnerEvaluation, ...], str]:
    """Return the derivatives and evaluations of the loss, and the nodes that a proof needs in addition to the graph.

    The nodes are text, as in `Roles`. Their values are renamed, because a later pass or tool may use the names again.
    """
    made = {*graph.producers(), *graph.input_names, *read_by(graph.nodes)}
    made.update(tensor.name for tensor in graph.proto.graph.initializer)
    wanted, nodes = _values(training) - made, []
    for node in reversed(training.proof_nodes):
        if not wanted.isdisjoint(node.output):
            nodes.append(copied(node))
            wanted |= set(reads(node)) - made
    names = {name: f"{PROOF_PREFIX}{name}" for name in wanted - {""}}
    rename(nodes, names)
    stored = GraphProto(node=[node.message() for node in reversed(nodes)])
    for name in sorted(wanted & training.proof_constants.keys()):
        stored.initializer.append(training.proof_constants[name])
        stored.initializer[-1].name = names[name]
    text = ""
    if nodes and stored.ByteSize() <= MAX_BYTES:
        text = base64.b64encode(stored.SerializeToString(deterministic=True)).decode()
    own = names if text else {}
    inner = tuple(each.renamed(own) for each in training.inner)
    return inner, tuple(each.renamed(own) for each in training.evaluated), text
