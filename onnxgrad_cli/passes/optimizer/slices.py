"""Part an optimizer's step into what it does to each element of a weight, and what is done once for all of them.

What is done to each element can be done to a slice of a weight at a time, and in place: then what lies between is a
slice and stays in the processor's cache, and the next weights can take the place of the last ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, TensorProto, helper

from onnxgrad_cli import metadata
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.inference import infer_types
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.skeleton import copied
from onnxgrad_cli.ir.types import FLOATS, dtype_of, shape_of
from onnxgrad_cli.metadata import Roles
from onnxgrad_cli.passes.optimizer.split import behind, narrowed

ELEMENTWISE = frozenset(
    "Abs Add And Cast Clip Div Equal Exp Greater GreaterOrEqual Less LessOrEqual Log Max Min Mul Neg Not Or Pow "
    "Reciprocal Sign Sqrt Sub Sum Tanh Where".split()
)
"""Operators of which an element of the result takes one element of each operand."""

COMPUTED = FLOATS | {TensorProto.BOOL}
"""The types of what these compute: a quotient of integers is another thing."""


@dataclass(frozen=True)
class Update:
    """What a step does to each element of a weight and of its slots.

    Attributes:
        weight: its name.
        nodes: elementwise ones, in order, with the names of the training model.
        dtypes: of what they compute and read, but for constants.
        vectors, scalars: what they read, the former of the weight's shape.
        constants: scalars that are known.
        outputs: what replaces -> the weight or slot that it replaces, the weight first.
    """

    weight: str
    nodes: tuple[Node, ...]
    dtypes: Mapping[str, np.dtype]
    vectors: tuple[str, ...]
    scalars: tuple[str, ...]
    constants: Mapping[str, np.ndarray]
    outputs: Mapping[str, str]


@dataclass(frozen=True)
class Slices:
    """A step of an optimizer: `common` first, then the updates in any order.

    Attributes:
        common: from gradients, state and the learning rate to the scalars of all updates, and to what replaces the
            weights and state that are not sliced.
        updates: one for each weight that is sliced.
    """

    common: ModelProto
    updates: tuple[Update, ...]


def slice_optimizer(optimizer: ModelProto, large: int) -> Slices | None:
    """Part an optimizer's step into what is done to each element of a weight, and the rest.

    Args:
        optimizer: that of the halves that `split` gives; not changed.
        large: the elements from which a weight is sliced, more than one.

    Returns:
        The parts; None where no weight of this size has a step that is elementwise but for scalars.
    """
    roles = metadata.read(optimizer)
    graph = Graph(copied(optimizer))
    infer_types(graph)
    producers = graph.producers()
    chains = [_Chain(graph, producers, roles, name) for name, role in roles.inputs.items() if role == "weight"]
    chains, scalars = _apart_from_scalars(graph, [c for c in chains if c.size >= large and c.is_elementwise])
    if not chains:
        return None
    sliced = {name for chain in chains for name in chain.outputs}
    common = narrowed(optimizer, [name for name in roles.outputs if name not in sliced] + scalars, graph.types)
    return Slices(common, tuple(chain.update() for chain in chains))


def _apart_from_scalars(graph: Graph, chains: list[_Chain]) -> tuple[list[_Chain], list[str]]:
    """The chains of which no node is needed for the scalars that they read, else it would be computed twice.

    Returns:
        The chains, and the scalars that are computed for them.
    """
    made = set(graph.made())
    while True:
        scalars = sorted(made.intersection(name for chain in chains for name in chain.scalars))
        computed = {name for node in behind(graph.nodes, scalars) for name in node.output}
        apart = [chain for chain in chains if computed.isdisjoint(chain.made)]
        if len(apart) == len(chains):
            return chains, scalars
        chains = apart  # fewer chains read fewer scalars


class _Chain:
    """The nodes from a weight, its gradient and slots to what replaces weight and slots.

    Attributes:
        outputs: what replaces -> what is replaced, the weight first.
        nodes: all with a result of the weight's shape, in order.
        vectors: what they read of this shape.
        scalars: what they read of one element.
    """

    def __init__(self, graph: Graph, makers: Mapping[str, Node], roles: Roles, weight: str) -> None:
        self._graph, self._makers = graph, makers
        self.shape = shape_of(graph.types[weight]) or ()
        own = [weight, *(name for name, slot in roles.slots.items() if slot.of == weight and slot.shape == self.shape)]
        self.outputs = {roles.successors[name]: name for name in own if name in roles.successors}
        self._foreign = {name for name, role in roles.inputs.items() if role in ("weight", "state")}.difference(own)
        self.nodes: list[Node] = []
        self.vectors: list[str] = []
        self.scalars: list[str] = []
        self._seen: set[str] = set()
        self.is_elementwise = bool(self.outputs) and all(self._reaches(name) for name in self.outputs)

    @property
    def size(self) -> int:
        """The elements of the weight; 0 where that is not known."""
        return math.prod(dim if isinstance(dim, int) else 0 for dim in self.shape)

    def _reaches(self, name: str) -> bool:
        """Whether a value comes of elementwise nodes alone, which are noted on the way."""
        if not name or name in self._seen:
            return True
        self._seen.add(name)
        shape, node = shape_of(self._graph.types.get(name)), self._makers.get(name)
        if shape is not None and set(shape) <= {1}:
            self.scalars.append(name)
            return True
        if shape != self.shape:
            return False
        if node is None:
            self.vectors.append(name)
            fed = name not in self._graph.initializers or name in self._graph.input_names
            return fed and name not in self._foreign  # which its own update may have written by then
        kind = dtype_of(self._graph.types[name])
        reached = node.op_type in ELEMENTWISE and kind in COMPUTED and all(map(self._reaches, node.input))
        self.nodes.append(node)
        return reached

    @property
    def made(self) -> set[str]:
        """What the nodes compute."""
        return {name for node in self.nodes for name in node.output}

    def update(self) -> Update:
        """The chain, told from the graph."""
        known = {name: self._graph.constant(name) for name in self.scalars}
        constants = {name: array.reshape(()) for name, array in known.items() if array is not None}
        scalars = tuple(name for name in self.scalars if name not in constants)
        dtypes = {name: self._dtype(name) for name in (*self.made, *self.vectors, *scalars)}
        weight = next(iter(self.outputs.values()))
        return Update(weight, tuple(self.nodes), dtypes, tuple(self.vectors), scalars, constants, self.outputs)

    def _dtype(self, name: str) -> np.dtype:
        return np.dtype(helper.tensor_dtype_to_np_dtype(dtype_of(self._graph.types[name])))
