"""Tables of frequencies: what positions, times or coordinates are multiplied by before Sin and Cos."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.nodes import reads
from onnxgrad_cli.passes.parameters.presets import VIEWS

PRODUCTS = frozenset("MatMul Gemm Conv ConvTranspose Einsum".split())
LAYERS = PRODUCTS | {"Gather", "LSTM", "GRU", "RNN"}
"""Operators whose stored operands make of an input what was learned."""

CARRIED = VIEWS | frozenset("Concat Gather Neg Slice Split Tile".split())
"""Operators that hand an angle on as it is."""

TURNS = frozenset({"Sin", "Cos"})


class Frequencies:
    """Which values become angles of sines and cosines, and of which inputs nothing was learned yet."""

    def __init__(self, graph: Graph, uses: Mapping[str, list[tuple[Node, int]]]) -> None:
        self.graph = graph
        self.uses = uses
        self.deep = self._behind_layers()
        turned = [node.input[0] for node in graph.nodes if node.op_type in TURNS]
        self.before = graph.ancestors(turned) if turned else set()

    def _behind_layers(self) -> set[str]:
        """Every value that a layer has made, or that was made of such."""
        floats = {name for name, tensor in self.graph.initializers.items() if len(tensor.dims) > 1}
        found: set[str] = set()
        for node in self.graph.nodes:
            names = reads(node)
            if not found.isdisjoint(names) or (node.op_type in LAYERS and not floats.isdisjoint(names)):
                found.update(node.output)
        return found

    def turns(self, name: str) -> tuple[set[str], bool]:
        """Whether a tensor becomes an angle in products: of Sin, of Cos, of both, and whether of what was learned.

        Between may stand what hands angles on, and further factors; a bias ends the way.
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
        """Whether a node hands on the angle that it reads at `position`, but for a fixed shift."""
        if node.op_type in ("Add", "Sub"):
            shift = self.graph.initializers.get(node.input[1 - position])
            return shift is not None and all(size == 1 for size in shift.dims)
        return position >= 0 and node.op_type in CARRIED and (position == 0 or node.op_type == "Concat")
