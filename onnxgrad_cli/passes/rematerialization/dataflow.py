"""Analyse which values the backward part of a training model reads from the forward part.

The forward part is cut into *segments*. A segment ends at an expensive operator, at a named boundary, at the end of a
layer, or when a chain of cheap nodes becomes long. A value is recomputed from stored values of any segment and from
other values of its own segment. So one recomputation never runs nodes of more than one segment.

The backward part begins with the cotangents of the outputs, which the YieldOp returns. Every value computed from these
is called a *cotangent* here. Some nodes of the backward part read no cotangent, such as the transpose of a forward
value. A runtime may run these at any time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence, Set

from onnxgrad_cli.cost.flops import EXACT
from onnxgrad_cli.cost.steps import VIEWS
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.modes import is_random
from onnxgrad_cli.ir.node import FORWARD, Node, metadata_of
from onnxgrad_cli.ir.node_values import depending_on, reads, subgraphs
from onnxgrad_cli.ir.types import shape_of
from onnxgrad_cli.record import BackwardRecord

EXPENSIVE = frozenset(EXACT) - {"AveragePool", "MaxPool", "LpPool"}
"""Operators that need many operations per element that they read, such as convolutions."""

SIZES = frozenset("Constant Shape Size".split())
"""Operators whose results depend on no data. Values computed from these alone are small, and runtimes fold them."""

LONGEST_CHAIN = 32
"""Largest number of consecutive cheap nodes in a segment. A longer chain would be recomputed as a whole."""


class Dataflow:
    """The forward values that the backward part reads, and the nodes that read them.

    Positions are indices into `backward`.

    Attributes:
        graph: the training model.
        forward: the nodes of the model up to the YieldOp, which is the last one.
        backward: the nodes after the YieldOp.
        producers: forward value -> the node that computes it.
        data_dependent: the values that depend on the model's inputs.
        segments: forward value -> the number of its segment.
        cotangents: the results of the YieldOp, and the values that depend on them.
        gradients: the gradients of weights and inputs.
        first_use: forward value -> the position of the first node that reads a cotangent and needs the value. The node
            reads the value itself, or a value that nodes without cotangents compute from it.
        node_use: for each node of `backward`, the position at which its result is needed. This is its own position if
            it reads a cotangent, otherwise the position of the first node that reads a cotangent and needs its result.
        must_store: forward values that may never be recomputed.
    """

    def __init__(
        self,
        graph: Graph,
        training: BackwardRecord,
        boundaries: Collection[str] = (),
        longest: int | None = None,
        ends: Callable[[Sequence[Node]], Sequence[int]] | None = None,
    ) -> None:
        """Analyse `graph`.

        Args:
            graph: a training model with its YieldOp, after the backward pass.
            training: its record.
            boundaries: names of nodes and values that end a segment.
            longest: largest number of nodes of a chain in a segment. If None, only `boundaries` end segments.
            ends: a function that returns the positions in the forward part at which segments end. If given, nothing
                else ends segments.
        """
        seeds = set(training.yielded.values())
        start = 1 + next(i for i, node in enumerate(graph.nodes) if seeds.intersection(node.output))
        self.graph = graph
        self.forward, self.backward = graph.nodes[:start], graph.nodes[start:]
        self.producers = {name: node for node in self.forward for name in node.output if name}
        self.data_dependent = _data_dependent(graph)
        self._viewed = self._find_views()
        if ends is not None:
            self.segments = Segments.between(self.forward, ends(self.forward))
        else:
            self.segments = Segments(self.forward, self.data_dependent, frozenset(boundaries), longest)
        self.gradients = set(training.gradients.values())
        self.cotangents = set(seeds)
        self._made_at: dict[int, list[str]] = {}  # position -> the cotangent tensors that its node computes
        self._unfoldable: set[str] = set()  # cotangents that depend on data too, so runtimes can't fold them
        self._first_unfoldable = len(self.backward)  # the position of the node that computes the first one
        self._find_cotangents()
        self.first_use: dict[str, int] = {}
        self.node_use = list(range(len(self.backward)))
        self.must_store: set[str] = set()
        self._find_uses()

    # -- the backward part ------------------------------------------------------------------------------------------

    def _find_cotangents(self) -> None:
        """Find all values of the backward part that depend on the results of the YieldOp."""
        for position, node in enumerate(self.backward):
            operands = reads(node)
            if self.cotangents.isdisjoint(operands):
                continue
            results = list(filter(None, node.output))
            if any(self._is_unfoldable(name) for name in operands):
                self._unfoldable.update(results)
                self._first_unfoldable = min(position, self._first_unfoldable)
            self.cotangents.update(results)
            self._made_at[position] = [name for name in results if self._is_tensor(name)]

    def _is_unfoldable(self, name: str) -> bool:
        return name in self._unfoldable or (name in self.data_dependent and name not in self.cotangents)

    def _find_uses(self) -> None:
        """Find for each forward value the first node that reads a cotangent and needs the value."""
        uses: dict[str, int] = {}  # value that is not a cotangent -> the first position where a cotangent needs it
        for position in reversed(range(len(self.backward))):
            node = self.backward[position]
            if self.cotangents.isdisjoint(node.output):
                use = min((uses[name] for name in node.output if name in uses), default=None)
            else:
                use = position
            if use is None:
                continue
            self.node_use[position] = use
            operands = [name for name in reads(node) if name not in self.cotangents]
            uses.update((name, min(use, uses.get(name, use))) for name in operands)
            self._store_operands(node, operands)
        self.first_use = {n: use for n, use in uses.items() if n in self.producers and n in self.data_dependent}
        self.must_store.update(name for name, use in self.first_use.items() if use <= self._first_unfoldable)

    def _store_operands(self, node: Node, operands: list[str]) -> None:
        """Mark operands of a backward node that must be stored: read by a body, or from another segment.

        The segment is compared with that of the forward node that the backward node differentiates.
        """
        segment = self.segments.read_by.get(metadata_of(node, FORWARD))
        if segment is not None:
            self.must_store.update(name for name in operands if self.segments.get(name, segment) != segment)
        if subgraphs(node):
            self.must_store.update(reads(node))

    def control_values(self, start: int, end: int) -> list[str]:
        """Return cotangents that don't exist before the backward part has reached position `end`.

        They are in memory at that time anyway: the cotangents that the node at `end` reads, and the gradients computed
        from position `start` on. If there are none, it is the cotangent that was computed last.
        """
        read = [name for name in reads(self.backward[end]) if name in self._unfoldable and self._is_tensor(name)]
        made = [name for at in range(start, end) for name in self._made_at.get(at, ()) if name in self._unfoldable]
        return [*(name for name in made if name in self.gradients and name not in read), *read] or made[-1:]

    def made_at(self) -> dict[str, int]:
        """Return a map from each cotangent that is a tensor to the position of the node that computes it."""
        return {name: position for position, names in self._made_at.items() for name in names}

    # -- forward values ---------------------------------------------------------------------------------------------

    def storage(self, name: str) -> str:
        """Return the value in whose memory `name` lies: the value that `name` is a view of, or `name` itself."""
        return self._viewed.get(name, name)

    def _find_views(self) -> dict[str, str]:
        """Return a map from each forward value that is a view to the value that it is a view of, through all views."""
        found: dict[str, str] = {}
        for name, node in self.producers.items():
            if node.op_type in VIEWS and not node.domain and self.data_dependent.isdisjoint(node.input[1:]):
                found[name] = found.get(node.input[0], node.input[0])
        return found

    def is_resident(self, name: str) -> bool:
        """Return True if a value is always in memory: an input, an initializer, or computed without data."""
        return name not in self.producers or name not in self.data_dependent

    def can_run_twice(self, node: Node) -> bool:
        """Return True if a second run of a node gives the same result and has no side effect.

        This requires a standard operator that draws no random numbers, updates no statistics and has no body. It also
        requires an operand that can be delayed.
        """
        if not is_standard(node.domain) or subgraphs(node) or is_random(self.graph, node):
            return False
        if any(a.name == "training_mode" and a.i for a in node.attribute) or node.op_type == "YieldOp":
            return False
        if not all(self._is_tensor(name) for name in (*node.input, *node.output) if name):
            return False
        return any(self.can_be_delayed(name) for name in node.input)

    def can_be_delayed(self, name: str) -> bool:
        """Return True if a Reshape can delay the readers of a value: it depends on data and has a known rank."""
        return name in self.data_dependent and bool(shape_of(self.graph.types.get(name)))

    def _is_tensor(self, name: str) -> bool:
        found = self.graph.types.get(name)
        return found is not None and found.HasField("tensor_type")


class Segments(dict[str, int]):
    """A map from each forward value to the number of its segment.

    Attributes:
        read_by: map from the name of a forward node to the last segment from which it reads.
    """

    @classmethod
    def between(cls, forward: Sequence[Node], ends: Sequence[int]) -> Segments:
        """Return segments that end at the given positions of `forward`, whatever values the nodes read."""
        found = cls((), frozenset(), frozenset(), None)
        for position, node in enumerate(forward):
            segment = bisect_right(ends, position)
            found.read_by[node.name] = segment
            found.update(dict.fromkeys(filter(None, node.output), segment))
        return found

    def __init__(
        self, forward: Sequence[Node], data_dependent: Set[str], boundaries: frozenset[str], longest: int | None
    ) -> None:
        super().__init__()
        self.read_by: dict[str, int] = {}
        chain: dict[str, int] = {}  # value -> the nodes of the longest chain that leads to it inside its segment
        for node in forward:
            segment = max((self.get(name, 0) for name in reads(node) if name in data_dependent), default=0)
            self.read_by[node.name] = segment
            length = 1 + max((chain.get(name, 0) for name in node.input if self.get(name) == segment), default=0)
            full = longest is not None and (node.op_type in EXPENSIVE or length > longest)
            ends = full or not boundaries.isdisjoint((node.name, *node.output))
            for name in filter(None, node.output):
                self[name] = segment + ends
                chain[name] = 0 if ends else length


def _data_dependent(graph: Graph) -> set[str]:
    nodes = (node for node in graph.nodes if node.op_type not in SIZES)
    return depending_on(nodes, set(graph.input_names).difference(graph.initializers))
