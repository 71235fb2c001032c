"""`NodeEmitter`: appends typed nodes, pools constants, and writes equal nodes once."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, TypeProto

from onnxgrad_cli.emission.typing import OutputTypes
from onnxgrad_cli.emission.values import VALUES, Val
from onnxgrad_cli.errors import Caution, InternalError, OnnxgradError
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.modules import origin
from onnxgrad_cli.ir.node import FORWARD, ROLE, Node
from onnxgrad_cli.ir.randomness import RANDOM
from onnxgrad_cli.ir.renaming import rename
from onnxgrad_cli.ir.types import HALVES, Dim, Shape, shape_of, tensor_type

FOLLOWS = frozenset("ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum".split())
"""Operators of which a shape is given for speed alone: it follows from the operands' types and constant axes."""


class NodeEmitter:
    """Writes nodes for a graph, each typed the moment it is written.

    Attributes:
        graph: the graph whose names, types and constants are used.
        opset: the version of the standard's operators that the graph imports.
        nodes: the nodes that were emitted, in order.
        scope: the stem of the names of new nodes.
        role, forward: what the metadata of new nodes say: the part of the training model they belong to, and the
            forward node they differentiate; "" is nothing.
        cautions: what a careful reader should know of these nodes.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.opset = graph.opset() or 1
        self.nodes: list[Node] = []
        self.scope = ""
        self.role = ""
        self.forward = ""
        self.cautions: list[Caution] = []
        self._output_types = OutputTypes(graph)
        self._vals: dict[str, Val] = {}
        self._shapes: dict[int, tuple[TypeProto | None, Shape | None]] = {}
        self._constants: dict[tuple[Any, ...], Val] = {}
        self._written: dict[tuple[Any, ...], Any] = {}
        self._elementwise: dict[tuple[Any, ...], tuple[Any, ...]] = {}  # operator, types' ids -> types, result's type
        self._renamed: dict[str, str] = {}
        self._origin: Mapping[str, str] = {}
        self._said = ("", "")
        self._told: Mapping[str, str] = {}

    # -- values ---------------------------------------------------------------------------------------------

    def val(self, name: str) -> Val:
        """The value called `name`."""
        value_type = self.graph.types.get(name)
        known = self._vals.get(name)
        if known is None or known.type is not value_type:
            known = self._vals[name] = Val(self, name, value_type, self._shape(value_type))
        return known

    def _shape(self, value_type: TypeProto | None) -> Shape | None:
        """The shape in a type, read once: many values share one type."""
        found = self._shapes.get(id(value_type))
        if found is None:
            found = self._shapes[id(value_type)] = (value_type, shape_of(value_type))  # kept, so that its id stays
        return found[1]

    def const(self, value: Any, dtype: int | Val | None = None) -> Val:
        """A constant: a number or an array, in `dtype` or the type of a value; ints default to int64."""
        if isinstance(dtype, Val):
            dtype = dtype.dtype
        scalar = (type(value), value, dtype) if isinstance(value, (int, float)) else None
        if scalar is not None and scalar in self._constants:
            return self._constants[scalar]
        array = np.asarray(value)
        if dtype is not None:
            array = array.astype(onnx.helper.tensor_dtype_to_np_dtype(dtype))
        key = (array.dtype.num, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = self.val(self.graph.add_constant(array))
        if scalar is not None:
            self._constants[scalar] = self._constants[key]
        return self._constants[key]

    def weight(self, name: str, values: np.ndarray) -> Val:
        """An initializer as if the model had stored it, to be trained: what a node holds in an attribute.

        In a body, or in a loss from a file, it is a constant.
        """
        if self.graph.is_part:
            return self.const(values)
        stored = self.graph.fresh(f"{self.scope}/{name}")
        self.graph.store(stored, values)
        return self.val(stored)

    def ints(self, values: Sequence[int]) -> Val:
        """A constant int64 vector."""
        key = tuple(values)
        if key not in self._constants:
            self._constants[key] = self.const(np.asarray(key, dtype=np.int64).reshape(-1))
        return self._constants[key]

    def cast(self, x: Val, dtype: int | Val) -> Val:
        """`x` in another element type."""
        to = dtype.dtype if isinstance(dtype, Val) else dtype
        return x if x.dtype == to else self.Cast(x, to=to)

    def wide(self, x: Val) -> Val:
        """`x` in the type in which statistics are taken: float32 for the half types, as operators do."""
        return self.cast(x, TensorProto.FLOAT) if x.dtype in HALVES else x

    def comparable(self, y: Val, again: Callable[[Val], Val], *xs: Val) -> tuple[Val, ...]:
        """A result and values of which it takes some as they are, in a form in which they are equal to it.

        onnxruntime computes most of what has 16 bits in float32, and leaves out the rounding from one such kernel to
        the next, while a kernel of 16 bits reads the same value rounded: a maximum then equals none of its operands.
        In float32 all kernels read one value.

        Args:
            y: the result.
            again: makes it of the values as `wide` gives them; called for the half types alone.
            *xs: the values.

        Returns:
            The result, and the values.
        """
        if y.dtype not in HALVES:
            return y, *xs
        wide = list(map(self.wide, xs))
        return again(*wide), *wide

    def state(self, x: Val, shape: Sequence[Dim | None] | None) -> Val:
        """`x` with the given shape, which the caller knows where inference does not."""
        self.graph.types[x.name] = self.graph.named(tensor_type(x.dtype, shape))
        self.graph.declared_shapes.add(x.name)
        return self.val(x.name)

    def replaces(self, node: Node) -> None:
        """Write the next nodes in place of one: they are named after it, and of the module that it is of."""
        self._origin = origin(node)
        self.scope, self.forward, self._said = node.name, self._origin[FORWARD], ("", "")

    # -- emission -------------------------------------------------------------------------------------------

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        if not op_type[:1].isupper():
            raise AttributeError(op_type)
        emit = self.__dict__[op_type] = partial(self.emit, op_type)  # the next call finds it at once
        return emit

    def emit(
        self,
        op_type: str,
        *inputs: Any,
        outputs: int = 1,
        domain: str = "",
        shape: Sequence[Dim | None] | None = None,
        types: Sequence[TypeProto] | None = None,
        **attributes: Any,
    ) -> Any:
        """Append a node, or find an equal one that was written before; the operands are values, numbers or arrays.

        Args:
            op_type, domain: the operator.
            inputs: the operands: a number or an array becomes a constant in the type of the first value; None is an
                operand left out.
            outputs: how many outputs the node has.
            shape: the first output's shape, where the caller knows more than inference.
            types: all that is to be known of the outputs' types, where the caller knows it.
            attributes: by name; None is left out.

        Returns:
            The output, a `Val`; a tuple of them for several outputs.

        Raises:
            Unknown: the type of an operand is unknown.
        """
        if domain:
            self.graph.use_domain(domain)
        asked, operands = op_type, self._operands(inputs)
        alike: tuple[Any, ...] = ()
        if not (attributes or domain or shape or types) and outputs == 1 and None not in operands:
            alike = (op_type, *[id(x.type) for x in operands])  # type: ignore[union-attr]
            if alike in self._elementwise:
                names = tuple([x.name for x in operands])  # type: ignore[union-attr]
                if self.is_plain(names):
                    return self._elementwise_result(op_type, names, self._elementwise[alike][-1])
        op_type, values, attributes = self.rewritten(op_type, operands, attributes)
        given = [_attribute(n, v) for n, v in attributes.items() if v is not None] if attributes else ()
        names = tuple([x.name if x is not None else "" for x in values])
        key = (op_type, domain, names, tuple(sorted([said for _, said in given])) if given else (), outputs)
        if key in self._written and op_type not in RANDOM:
            return self._written[key]
        node, out = self._node(op_type, domain, names, [attribute for attribute, _ in given], outputs)
        if types is not None:
            self.graph.types.update(zip(out, types, strict=True))
        elif (seen := self._output_types.at_a_glance(op_type, values, shape)) is not None:
            self.graph.types[out[0]] = seen
            if alike and (op_type, values) == (asked, operands):
                self._elementwise[alike] = *[x.type for x in operands if x is not None], seen
        else:
            self.graph.types.update(self._output_types.infer(node, values, shape))
        if types is not None or (shape is not None and op_type not in FOLLOWS):
            self.graph.declared_shapes.update(out)
        self.nodes.append(node)
        result = self._written[key] = tuple([self.val(name) for name in out]) if outputs > 1 else self.val(out[0])
        return result

    def _elementwise_result(self, op_type: str, names: tuple[str, ...], value_type: TypeProto) -> Val:
        """The output of a node like one that was written before: of its operator, with operands of the same types."""
        key = (op_type, "", names, (), 1)
        result = self._written.get(key)
        if result is None:
            node, (out,) = self._node(op_type, "", names, (), 1)
            self.graph.types[out] = value_type
            self.nodes.append(node)
            result = Val(self, out, value_type, self._shape(value_type))
            self._vals[out] = self._written[key] = result
        return result

    def is_plain(self, names: Sequence[str]) -> bool:
        """Whether the form of a node that reads some values depends on nothing but their types."""
        return True

    def rewritten(
        self, op_type: str, operands: list[Val | None], attributes: dict[str, Any]
    ) -> tuple[str, list[Val | None], dict[str, Any]]:
        """The node to write: operator, operands and attributes as they are, unless a subclass knows a faster form."""
        return op_type, operands, attributes

    def _operands(self, inputs: Sequence[Any]) -> list[Val | None]:
        """The inputs of a node as values: numbers and arrays become constants, and what is left out last goes."""
        if set(map(type, inputs)) == VALUES:
            return list(inputs)
        like = next((x for x in inputs if isinstance(x, Val)), None)
        operands = [x if x is None or isinstance(x, Val) else self.const(x, like) for x in inputs]
        while operands and operands[-1] is None:
            operands.pop()
        return operands

    def _node(
        self, op_type: str, domain: str, names: Sequence[str], attributes: Sequence[AttributeProto], outputs: int
    ) -> tuple[Node, list[str]]:
        """A new node under a fresh name, with its metadata, and the names of its outputs."""
        name = self.graph.fresh(f"{self.scope}/{op_type}" if self.scope else op_type)
        out = [self.graph.fresh(f"{name}_out")]
        out += [self.graph.fresh(f"{name}_out{i}") for i in range(1, outputs)] if outputs > 1 else ()
        return Node(op_type, names, out, name, domain, attributes, self._metadata()), out

    def _metadata(self) -> Mapping[str, str]:
        """What the metadata of a new node say: one object for all nodes of which they say the same."""
        said = (self.role, self.forward)
        if said != self._said:
            texts = {key: text for key, text in zip((ROLE, FORWARD), said, strict=True) if text}
            self._said, self._told = said, {**self._origin, **texts}
        return self._told

    def infer(self, node: Node) -> dict[str, TypeProto]:
        """The types of the outputs of a node of the model's, or of a graph in it, as onnx infers them.

        Raises:
            Unknown: the type of an input is unknown.
            OnnxgradError: the node contradicts itself.
        """
        try:
            return self._output_types.infer(node, [self.val(name) if name else None for name in node.input])
        except InternalError as error:
            label = node.name or next(iter(node.output), "")
            raise OnnxgradError(f"the model contradicts itself: {error.__cause__}", f"see node '{label}'") from error

    def schema(self, op_type: str, domain: str = "") -> onnx.defs.OpSchema:
        """The schema of an operator at the graph's opset."""
        return self._output_types.schema(op_type, domain)

    def attributes(self, op_type: str, domain: str = "") -> dict[str, Any]:
        """The attributes of an operator with their defaults (None where there is none); {} without a schema."""
        return self._output_types.attributes(op_type, domain)

    # -- names ----------------------------------------------------------------------------------------------

    def rename(self, value: Val, name: str) -> Val:
        """Call a result of this emitter `name`; a value from elsewhere, or with such a name, becomes an Identity."""
        self.rename_all({name: value})
        return self.val(name)

    def rename_all(self, results: Mapping[str, Val]) -> None:
        """Call each result by the name before it, as `rename` does; one with several names becomes Identities."""
        made = set(itertools.chain.from_iterable([node.output for node in self.nodes]))
        claimed = set(self._renamed.values())
        names: dict[str, str] = {}
        for name, value in results.items():
            value = self.val(self._renamed.get(value.name, value.name))
            while value.name not in made or value.name in claimed or value.name in names:
                value = self.emit("Identity", value)
                made.add(value.name)
            names[value.name] = name
        rename(self.nodes, names)
        for old, new in names.items():
            self.graph.types[new] = self.graph.types[old]
            if old in self.graph.declared_shapes:
                self.graph.declared_shapes.add(new)
        self._renamed.update(names)
        self._written.clear()

    def forget(self) -> None:
        """Let go of all that was written, which others have by now.

        Values know their emitter and it knows them, so without this they would stay in memory for good: cycles are not
        looked for in a build.
        """
        self.nodes = []
        for known in (self._vals, self._constants, self._written, self._renamed):
            known.clear()


def _attribute(name: str, value: Any) -> tuple[AttributeProto, bytes]:
    """An attribute of a node, and its bytes; the few of ints and words that most nodes have are made once."""
    kind = type(value)
    if kind is int or kind is str:
        return _made_once(name, value)
    if kind is list and set(map(type, value)) == _INTS:
        return _made_once(name, tuple(value))
    return _made(name, value)


def _made(name: str, value: Any) -> tuple[AttributeProto, bytes]:
    attribute = onnx.helper.make_attribute(name, value)
    return attribute, attribute.SerializeToString()


_INTS = {int}
_made_once = functools.cache(_made)
