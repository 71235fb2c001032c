"""`Op`, the emitter that rules, losses, optimizers and definitions write with.

It is built up in layers, each in a module of its own: typed nodes (`nodes`), shapes (`shapes`), reductions
(`reductions`), and the forms that run fastest (`peepholes`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from onnxgrad_cli.emission.peepholes import Peepholes
from onnxgrad_cli.emission.values import No, Val
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node


class Op(Peepholes):
    """The emitter: `op.MatMul(a, b)` appends a typed node to `nodes` and returns its output.

    Any operator can be called by its name; a number or an array among the inputs becomes a constant in the type
    of the first value, `outputs=n` returns a tuple, and attributes are keywords (None is left out). Names in
    lower case are shorthands that also decide at build time what can be decided then.

    Attributes:
        wanted: `wanted(name)` says whether anybody wants the cotangent of a value.
        node: the forward node that is being differentiated, or replaced by its definition.
        training: the settings and the record of the walk that differentiates it, a `Differentiation`.
    """

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self.wanted: Callable[[str], bool] = lambda name: True
        self.node: Node | None = None
        self.training: Any = None
        self._readers: dict[str, list[tuple[Node, int]]] | None = None
        self._makers: dict[str, Node] | None = None

    def readers(self, name: str) -> list[tuple[Node, int]]:
        """The forward nodes that read a value, and at which input (-1: inside a subgraph)."""
        if self._readers is None:
            self._readers = self.graph.uses()
        return self._readers.get(name, [])

    def maker(self, x: Val) -> Node | None:
        """The forward node that makes a value."""
        if self._makers is None:
            self._makers = self.graph.producers()
        return self._makers.get(x.name)

    def gathered(self, x: Val) -> tuple[Val, Val] | None:
        """The tensor and the vector of indices that a value is the Gather of, along axis 0; None where it is none."""
        maker = self.maker(x)
        if maker is None or maker.op_type != "Gather":
            return self._taken.get(x.name)
        axis = next((a.i for a in maker.attribute if a.name == "axis"), 0)
        source, indices = (self.val(name) for name in maker.input)
        return (source, indices) if axis == 0 and indices.known_shape and indices.rank == 1 else None

    def wants(self, x: Val | None) -> bool:
        """Whether anybody wants the cotangent of `x`."""
        return x is not None and self.wanted(x.name)

    def variant(self, name: str, forms: Sequence[str], default: str) -> str:
        """Which of several forms of a gradient to write: `default`, unless another one is preferred or requested."""
        return default if self.training is None else self.training.kernel_variants.choose(self, name, forms, default)

    def stands_for(self, value: Val) -> None:
        """Note that the kernel of the node that a definition replaces gives `value`, or the product with it."""
        if self.node is not None:
            self.graph.kernels[value.name] = self.node

    def no(self, reason: str, hint: str = "") -> No:
        """Refuse the cotangent of one operand, with the reason."""
        return No(reason, hint)
