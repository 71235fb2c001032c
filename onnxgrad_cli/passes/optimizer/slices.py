"""Part an optimizer's step into what it does to each element of a weight, and what is done once for all of them.

What is done to each element can be done to a slice of a weight at a time: then what lies between is a slice and stays
in the processor's cache, and the next weights can take the place of the last ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from onnx import ModelProto, NodeProto, ValueInfoProto, helper, numpy_helper

from onnxgrad_cli import metadata
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.inference import infer_types
from onnxgrad_cli.ir.skeleton import copied
from onnxgrad_cli.ir.types import dtype_of, shape_of
from onnxgrad_cli.metadata import Roles
from onnxgrad_cli.passes.optimizer.split import behind, narrowed

ELEMENTWISE = frozenset(
    "Abs Add And Cast Clip Div Equal Exp Greater GreaterOrEqual Less LessOrEqual Log Max Min Mul Neg Not Or Pow "
    "Reciprocal Sign Sqrt Sub Sum Tanh Where".split()
)
"""Operators of which an element of the result takes one element of each operand."""

LENGTH = "n"


@dataclass(frozen=True)
class Update:
    """What a step does to each element of a weight and of its slots.

    Attributes:
        weight: its name.
        model: from vectors of one length and scalars to vectors of this length; equal for weights that are alike.
        vectors, scalars: input of the model -> what it is in the training model; the former are of the weight's shape.
        outputs: output of the model -> the weight or slot that it replaces, the weight first.
    """

    weight: str
    model: ModelProto
    vectors: dict[str, str]
    scalars: dict[str, str]
    outputs: dict[str, str]


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
        large: the elements from which a weight is sliced.

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

    def __init__(self, graph: Graph, makers: Mapping[str, NodeProto], roles: Roles, weight: str) -> None:
        self._graph, self._makers = graph, makers
        self.shape = shape_of(graph.types[weight]) or ()
        own = [weight, *(name for name, slot in roles.slots.items() if slot.of == weight and slot.shape == self.shape)]
        self.outputs = {roles.successors[name]: name for name in own if name in roles.successors}
        self._foreign = {name for name, role in roles.inputs.items() if role in ("weight", "state")}.difference(own)
        self.nodes: list[NodeProto] = []
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
        reached = node.op_type in ELEMENTWISE and all(map(self._reaches, node.input))
        self.nodes.append(node)
        return reached

    @property
    def made(self) -> set[str]:
        """What the nodes compute."""
        return {name for node in self.nodes for name in node.output}

    def update(self) -> Update:
        """The nodes as a model of vectors; names are given in the order of nodes, so that like chains become equal."""
        names: dict[str, str] = {"": ""}
        nodes: list[NodeProto] = []
        for node in self.nodes:
            name = f"optimizer/{node.op_type}_{len(nodes)}"
            copy = NodeProto(name=name, op_type=node.op_type, domain=node.domain, attribute=node.attribute)
            copy.input.extend(names.setdefault(name, f"v{len(names)}") for name in node.input)
            copy.output.extend(names.setdefault(name, f"v{len(names)}") for name in node.output)
            nodes.append(copy)
        vectors = {names[name]: name for name in self.vectors}
        constants = {name: self._graph.constant(name) for name in self.scalars}
        scalars = {names[name]: name for name in self.scalars if constants[name] is None}
        inputs = [self._info(inner, name, [LENGTH]) for inner, name in vectors.items()]
        inputs += [self._info(inner, name, []) for inner, name in scalars.items()]
        outputs = {names[name]: replaced for name, replaced in self.outputs.items()}
        results = [self._info(names[name], name, [LENGTH]) for name in self.outputs]
        stored = [numpy_helper.from_array(a.reshape(()), names[n]) for n, a in constants.items() if a is not None]
        body = helper.make_graph(nodes, "update", inputs, results, stored)
        model = helper.make_model(body, opset_imports=self._graph.proto.opset_import)
        model.ir_version = self._graph.proto.ir_version
        return Update(self.outputs[next(iter(self.outputs))], model, vectors, scalars, outputs)

    def _info(self, inner: str, name: str, shape: list[str]) -> ValueInfoProto:
        return helper.make_tensor_value_info(inner, dtype_of(self._graph.types[name]), shape)
