"""Nodes of a prepared model have names of their own."""

from __future__ import annotations

from onnxgrad_cli.builder import build
from tests.passes.test_pipeline import parse


def test_unnamed_and_doubly_named_nodes_get_names() -> None:
    model = parse("""
    g (float[N, 2] x) => (float[N, 2] y) <float[2] w = {1, 2}> { a = Mul(x, w) b = Mul(a, w) y = Relu(b) }
    """)
    model.graph.node[0].name = model.graph.node[1].name = "same"
    names = [node.name for node in build(model).model.graph.node]
    assert all(names)
    assert len(set(names)) == len(names)
