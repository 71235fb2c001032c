"""`Op`, the emitter with which rules, losses, optimizers and definitions write nodes.

Each of its base classes has its own module: typed nodes (`node_emitter`), shapes (`shapes`), reductions (`reductions`)
and faster forms of nodes (`peepholes`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from onnxgrad_cli.emission.peepholes import Peepholes
from onnxgrad_cli.emission.values import No, Val
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node


class Op(Peepholes):
    """The emitter: `op.MatMul(a, b)` appends a typed node to `nodes` and returns its output.

    Every operator is a method with the operator's name. A number or an array among the inputs becomes a constant with
    the element type of the first input that is a value. With `outputs=n`, the method returns a tuple of n outputs.
    Attributes are keyword arguments; an attribute that is None is omitted. Methods in lower case are shorthands, which
    write fewer nodes if shapes or values are known at build time.

    Attributes:
        wanted: `wanted(name)` returns True if the cotangent of a value is needed.
        node: the forward node that is being differentiated or is being replaced by its definition.
        training: the settings and the record of the differentiation, a `Differentiation`.
    """

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self.wanted: Callable[[str], bool] = lambda name: True
        self.node: Node | None = None
        self.training: Any = None
        self._readers: dict[str, list[tuple[Node, int]]] | None = None
        self._makers: dict[str, Node] | None = None

    def readers(self, name: str) -> list[tuple[Node, int]]:
        """Return the forward nodes that read a value, each with the position of the input; -1 for a read in a body."""
        if self._readers is None:
            self._readers = self.graph.uses()
        return self._readers.get(name, [])

    def maker(self, x: Val) -> Node | None:
        """Return the forward node that computes a value, or None."""
        if self._makers is None:
            self._makers = self.graph.producers()
        return self._makers.get(x.name)

    def within(self, scope: str = "", graph: Graph | None = None) -> Op:
        """Return an emitter for the nodes of a body, with this emitter's role."""
        inner = Op(graph or self.graph)
        inner.role, inner.forward, inner.scope = self.role, self.forward, scope
        return inner

    def in_place_of_node(self) -> Op:
        """Return an emitter for the nodes that `replace_node` will put in place of `node`."""
        assert self.node is not None
        forward = Op(self.graph)
        forward.scope = forward.forward = self.node.name
        return forward

    def replace_node(self, forward: Op, results: Mapping[str, Val]) -> None:
        """Replace `node` by the nodes that `forward` has emitted. The outputs keep their names and types."""
        graph, types = self.graph, {name: self.graph.types[name] for name in results}
        forward.rename_all(results)
        graph.types.update(types)
        graph.set_nodes([each for old in graph.nodes for each in (forward.nodes if old is self.node else [old])])

    def gathered(self, x: Val) -> tuple[Val, Val] | None:
        """Return x and rows if a value is Gather(x, rows) along axis 0 with a vector `rows`; otherwise None."""
        maker = self.maker(x)
        if maker is None or maker.op_type != "Gather":
            return self._taken.get(x.name)
        axis = next((a.i for a in maker.attribute if a.name == "axis"), 0)
        source, indices = (self.val(name) for name in maker.input)
        return (source, indices) if axis == 0 and indices.known_shape and indices.rank == 1 else None

    def wants(self, x: Val | None) -> bool:
        """Return True if the cotangent of `x` is needed."""
        return x is not None and self.wanted(x.name)

    def variant(self, name: str, forms: Sequence[str], default: str) -> str:
        """Return the name of the form in which a gradient is to be written.

        Args:
            name: the gradient that has several forms, such as 'weight gradient'.
            forms: the possible forms for this node.
            default: the form to use unless another one is preferred or requested.
        """
        return default if self.training is None else self.training.kernel_variants.choose(self, name, forms, default)

    def stands_for(self, value: Val) -> None:
        """Record that onnxruntime's kernel of `node` computes `value` or a product with `value`.

        A definition calls this method while it replaces `node`.
        """
        if self.node is not None:
            self.graph.kernels[value.name] = self.node

    def no(self, reason: str, hint: str = "") -> No:
        """Return a refusal of the cotangent of one operand, with the reason."""
        return No(reason, hint)
