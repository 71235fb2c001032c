"""The values that nodes read, and those that their bodies capture."""

from __future__ import annotations

from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node_values import reads
from tests.passes.test_pipeline import parse


def test_reads_include_captures() -> None:
    model = parse("""
    g (bool c, float[N] x) => (float[N] y) {
        y = If(c) <then_branch = t () => (float[N] a) { a = Neg(x) },
                   else_branch = e () => (float[N] b) { k = Abs(x) b = Add(k, x) }>
    }
    """)
    assert set(reads(model.graph.node[0])) == {"c", "x"}
    uses = Graph(model).uses()
    assert [position for _, position in uses["x"]] == [-1]
