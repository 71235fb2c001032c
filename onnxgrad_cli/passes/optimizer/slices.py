"""Split an optimizer's step into elementwise updates, one per weight, and a common part for all weights.

An elementwise update can run on one slice of a weight at a time, and in place. The intermediate values are then as
small as a slice and stay in the processor's cache, and the new weights can overwrite the old ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, TensorProto, helper

from onnxgrad_cli import metadata
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.node_values import behind
from onnxgrad_cli.ir.type_inference import infer_types
from onnxgrad_cli.ir.types import FLOATS, dtype_of, known_sizes, shape_of
from onnxgrad_cli.ir.weightless_copy import copied
from onnxgrad_cli.metadata import Roles
from onnxgrad_cli.passes.optimizer.split import narrowed

ELEMENTWISE = frozenset(
    "Abs Add And Cast Clip Div Equal Exp Greater GreaterOrEqual Less LessOrEqual Log Max Min Mul Neg Not Or Pow "
    "Reciprocal Sign Sqrt Sub Sum Tanh Where".split()
)
"""Elementwise operators, whose result has one element for each element of the (broadcast) operands."""

COMPUTED = FLOATS | {TensorProto.BOOL}
"""The element types that elementwise nodes may compute. Integers are excluded, because their quotients are rounded."""


@dataclass(frozen=True)
class Update:
    """The elementwise part of a step for one weight and its slots.

    Attributes:
        weight: name of the weight.
        nodes: elementwise nodes in execution order, with the names of the training model.
        dtypes: map from each value that the nodes compute or read, except constants, to its type.
        vectors, scalars: the values that the nodes read. A vector has the weight's shape, a scalar one element.
        constants: map from a scalar that is a constant to its value.
        outputs: map from a new value to the weight or slot that it replaces. The weight comes first.
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
    """An optimizer's step in parts: `common` runs first, then the updates in any order.

    Attributes:
        common: a model. From gradients, state and the learning rate, it computes the scalars that updates read, and the
            new values of weights and state that have no update.
        updates: one for each sliced weight.
    """

    common: ModelProto
    updates: tuple[Update, ...]


def slice_optimizer(optimizer: ModelProto, large: int) -> Slices | None:
    """Split an optimizer's step into elementwise updates and the rest.

    Args:
        optimizer: the optimizer half that `split` returns; not changed.
        large: smallest number of elements of a weight that gets an update of its own; above 1.

    Returns:
        The parts, or None if no weight of this size has an elementwise step. Such a step may also read scalars, however
        they are computed.
    """
    roles = metadata.read(optimizer)
    graph = Graph(copied(optimizer))
    infer_types(graph)
    producers = graph.producers()
    chains = [_Chain(graph, producers, roles, name) for name, role in roles.inputs.items() if role == "weight"]
    chains, scalars = _apart_from_scalars(
        graph, [c for c in chains if c.is_elementwise and math.prod(known_sizes(c.shape) or (0,)) >= large]
    )
    if not chains:
        return None
    sliced = {name for chain in chains for name in chain.outputs}
    common = narrowed(optimizer, [name for name in roles.outputs if name not in sliced] + scalars, graph.types)
    return Slices(common, tuple(chain.update() for chain in chains))


def _apart_from_scalars(graph: Graph, chains: list[_Chain]) -> tuple[list[_Chain], list[str]]:
    """Return the chains that share no node with the computation of scalars that chains read.

    The other chains would compute those nodes twice.

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
    """The nodes that compute the new values of a weight and its slots.

    Attributes:
        outputs: map from a new value to the value that it replaces. The weight comes first.
        nodes: all nodes whose result has the weight's shape, in order.
        vectors: the values of this shape that the nodes read.
        scalars: the values of one element that the nodes read.
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

    def _reaches(self, name: str) -> bool:
        """Follow a value back to the values that it is computed from. Return True if all nodes between are elementwise.

        The search ends at values of one element, which are added to `scalars`, and at values that no node computes,
        which are added to `vectors`. The nodes are added to `nodes`. The result is also False if the search ends at a
        constant, or at a weight or state that another update may have overwritten.
        """
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
            return fed and name not in self._foreign  # another update may have overwritten it
        kind = dtype_of(self._graph.types[name])
        reached = node.op_type in ELEMENTWISE and kind in COMPUTED and all(map(self._reaches, node.input))
        self.nodes.append(node)
        return reached

    @property
    def made(self) -> set[str]:
        """The values that the nodes compute."""
        return {name for node in self.nodes for name in node.output}

    def update(self) -> Update:
        """Return the update, which holds no references to the graph."""
        known = {name: self._graph.constant(name) for name in self.scalars}
        constants = {name: array.reshape(()) for name, array in known.items() if array is not None}
        scalars = tuple(name for name in self.scalars if name not in constants)
        dtypes = {
            name: np.dtype(helper.tensor_dtype_to_np_dtype(dtype_of(self._graph.types[name])))
            for name in (*self.made, *self.vectors, *scalars)
        }
        weight = next(iter(self.outputs.values()))
        return Update(weight, tuple(self.nodes), dtypes, tuple(self.vectors), scalars, constants, self.outputs)
