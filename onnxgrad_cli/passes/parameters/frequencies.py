"""Find tables of frequencies: tensors that multiply positions, times or coordinates before Sin and Cos."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.node_values import depending_on, reads
from onnxgrad_cli.passes.parameters.presets import VIEWS

PRODUCTS = frozenset("MatMul Gemm Conv ConvTranspose Einsum".split())
LAYERS = PRODUCTS | {"Gather", "LSTM", "GRU", "RNN"}
"""Operators that count as layers if they read an initializer of two or more axes, such as a weight matrix."""

CARRIED = VIEWS | frozenset("Concat Gather Neg Slice Split Tile".split())
"""Operators whose output has the same angles as their input, only rearranged or negated."""

TURNS = frozenset({"Sin", "Cos"})


class Frequencies:
    """Finds the tensors that multiply the angles of Sin and Cos, and finds out if layers compute the other operands."""

    def __init__(self, graph: Graph, uses: Mapping[str, list[tuple[Node, int]]]) -> None:
        self.graph = graph
        self.uses = uses
        floats = {name for name, tensor in self.graph.initializers.items() if len(tensor.dims) > 1}
        layers = (n for n in self.graph.nodes if n.op_type in LAYERS and not floats.isdisjoint(reads(n)))
        self.deep = depending_on(self.graph.nodes, (name for node in layers for name in node.output))
        turned = [node.input[0] for node in graph.nodes if node.op_type in TURNS]
        self.before = graph.ancestors(turned) if turned else set()

    def turns(self, name: str) -> tuple[set[str], bool]:
        """Return the functions ("Sin", "Cos") whose angles are products with `name`, and a flag.

        The flag is True if another operand of these products depends on a layer. Operators of `CARRIED` and further
        multiplications may follow before Sin or Cos. The search stops at a bias.
        """
        found: set[str] = set()
        deep = False
        if name not in self.before:
            return found, deep
        seen = {name}
        queue = deque([(name, False)])
        while queue:
            value, multiplied = queue.popleft()
            for node, position in self.uses.get(value, ()):
                if node.op_type in TURNS:
                    found |= {node.op_type} if multiplied else set()
                    continue
                times = node.op_type in PRODUCTS or node.op_type in ("Mul", "Div")
                if not times and not self._carries(node, position):
                    continue
                others = {other for other in node.input if other and other != value} if times else set()
                deep |= not others.isdisjoint(self.deep)
                for made in (set(node.output) & self.before) - seen:
                    seen.add(made)
                    queue.append((made, multiplied or times))
        return found, deep

    def _carries(self, node: Node, position: int) -> bool:
        """Return True if the output of a node is the angle it reads at `position`, possibly shifted by a constant."""
        if node.op_type in ("Add", "Sub"):
            shift = self.graph.initializers.get(node.input[1 - position])
            return shift is not None and all(size == 1 for size in shift.dims)
        return position >= 0 and node.op_type in CARRIED and (position == 0 or node.op_type == "Concat")
