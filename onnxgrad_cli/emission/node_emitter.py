"""`NodeEmitter`: appends typed nodes, shares equal constants, and writes equal nodes only once."""

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
from onnxgrad_cli.errors import Caution, InternalError, unreadable
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.modes import RANDOM
from onnxgrad_cli.ir.modules import origin
from onnxgrad_cli.ir.node import FORWARD, ROLE, Node
from onnxgrad_cli.ir.renaming import rename
from onnxgrad_cli.ir.types import HALVES, Dim, Shape, shape_of, tensor_type

FOLLOWS = frozenset("ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum".split())
"""Operators for which onnx infers the shape of the result. Callers pass the shape only to save time."""


class NodeEmitter:
    """Writes nodes for a graph, and infers the types of their outputs immediately.

    Attributes:
        graph: the graph that provides names, types and constants.
        opset: the version of the standard's operators that the graph imports.
        nodes: the nodes that were emitted, in order.
        scope: the prefix of the names of new nodes.
        role: the part of the training model that is written to the metadata of new nodes, or "".
        forward: the name of the forward node that new nodes differentiate, written to their metadata, or "".
        cautions: cautions for the user about these nodes.
        in_function: True while a loss function of the user emits nodes.
    """

    in_function = False

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
        # (operator, ids of the operands' types) -> (the operands' types, the type of the result)
        self._elementwise: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._renamed: dict[str, str] = {}
        self._origin: Mapping[str, str] = {}
        self._said = ("", "")
        self._told: Mapping[str, str] = {}

    # -- values ---------------------------------------------------------------------------------------------

    def val(self, name: str) -> Val:
        """Return the value called `name`."""
        value_type = self.graph.types.get(name)
        known = self._vals.get(name)
        if known is None or known.type is not value_type:
            known = self._vals[name] = Val(self, name, value_type, self._shape(value_type))
        return known

    def _shape(self, value_type: TypeProto | None) -> Shape | None:
        """Return the shape in a type. The result is cached for each type object, because many values share one."""
        found = self._shapes.get(id(value_type))
        if found is None:
            # value_type is kept alive, so that its id stays valid
            found = self._shapes[id(value_type)] = (value_type, shape_of(value_type))
        return found[1]

    def const(self, value: Any, dtype: int | Val | None = None) -> Val:
        """Return a constant for a number or an array. `dtype` is its element type, or a value with that type."""
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
        """Store an array from a node's attribute as an initializer, which can be trained, and return its value.

        In the body of a control-flow operator, and in a loss from a file, the array becomes a constant instead.
        """
        if self.graph.is_part:
            return self.const(values)
        stored = self.graph.fresh(f"{self.scope}/{name}")
        self.graph.store(stored, values)
        return self.val(stored)

    def ints(self, values: Sequence[int]) -> Val:
        """Return a constant int64 vector."""
        key = tuple(values)
        if key not in self._constants:
            self._constants[key] = self.const(np.asarray(key, dtype=np.int64).reshape(-1))
        return self._constants[key]

    def cast(self, x: Val, dtype: int | Val) -> Val:
        """Return `x`, converted to the element type `dtype` or to that of another value."""
        to = dtype.dtype if isinstance(dtype, Val) else dtype
        return x if x.dtype == to else self.Cast(x, to=to)

    def wide(self, x: Val) -> Val:
        """Return `x` in the type for sums and statistics: float32 instead of float16 and bfloat16."""
        return self.cast(x, TensorProto.FLOAT) if x.dtype in HALVES else x

    def comparable(self, y: Val, again: Callable[[Val], Val], *xs: Val) -> tuple[Val, ...]:
        """Return the result of a selecting operator, such as Max, and its operands in a type that compares exactly.

        For 16-bit floats, onnxruntime computes most operators in float32 and does not round values between such
        kernels. A kernel with 16-bit inputs reads the rounded values. A maximum may then equal none of its operands. If
        all values are float32, all kernels read the same numbers.

        Args:
            y: the result.
            again: a function that computes the result from the float32 operands. It is called only for float16 and
                bfloat16.
            *xs: the operands.

        Returns:
            The result and the operands, in float32 instead of float16 and bfloat16.
        """
        if y.dtype not in HALVES:
            return y, *xs
        wide = list(map(self.wide, xs))
        return again(*wide), *wide

    def state(self, x: Val, shape: Sequence[Dim | None] | None) -> Val:
        """Declare the shape of `x` if shape inference does not find it but the caller knows it. Return `x` with it."""
        self.graph.types[x.name] = self.graph.named(tensor_type(x.dtype, shape))
        self.graph.declared_shapes.add(x.name)
        return self.val(x.name)

    def replaces(self, node: Node) -> None:
        """Give new nodes the name of the node that they replace, as a prefix, and its module."""
        self._origin = origin(node)
        self.scope, self.forward, self._said = node.name, self._origin[FORWARD], ("", "")

    # -- emission -------------------------------------------------------------------------------------------

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        if not op_type[:1].isupper():
            raise AttributeError(op_type)
        emit = self.__dict__[op_type] = partial(self.emit, op_type)  # the next access finds it without __getattr__
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
        """Append a node, unless an equal one was written before.

        Args:
            op_type, domain: the operator.
            inputs: the operands: values, numbers or arrays. A number or an array becomes a constant in the type of
                the first value. None is an omitted operand.
            outputs: the number of outputs of the node.
            shape: the shape of the first output, if the caller knows more than inference finds.
            types: the types of all outputs, if the caller knows them.
            attributes: name -> value; None is omitted.

        Returns:
            The output, a `Val`, or a tuple of them for several outputs.

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
        """Emit a node whose output type is already known from an earlier node, and return its output.

        An equal node that was written before is reused.

        Args:
            op_type: the operator.
            names: the inputs.
            value_type: the type of the output, from a node with the same operator and operand types.
        """
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
        """Return True if `rewritten` depends only on the types of these values, not on the nodes that compute them."""
        return True

    def rewritten(
        self, op_type: str, operands: list[Val | None], attributes: dict[str, Any]
    ) -> tuple[str, list[Val | None], dict[str, Any]]:
        """Return the operator, operands and attributes to write. Subclasses override this to return faster forms."""
        return op_type, operands, attributes

    def _operands(self, inputs: Sequence[Any]) -> list[Val | None]:
        """Return a node's inputs as values: numbers and arrays become constants, and None at the end is removed."""
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
        """Return a new node with an unused name and metadata, and the names of its outputs."""
        name = self.graph.fresh(f"{self.scope}/{op_type}" if self.scope else op_type)
        out = [self.graph.fresh(f"{name}_out")]
        out += [self.graph.fresh(f"{name}_out{i}") for i in range(1, outputs)] if outputs > 1 else ()
        return Node(op_type, names, out, name, domain, attributes, self._metadata()), out

    def _metadata(self) -> Mapping[str, str]:
        """Return the metadata of a new node. Nodes with equal metadata share one object."""
        said = (self.role, self.forward)
        if said != self._said:
            texts = {key: text for key, text in zip((ROLE, FORWARD), said, strict=True) if text}
            self._said, self._told = said, {**self._origin, **texts}
        return self._told

    def infer(self, node: Node) -> dict[str, TypeProto]:
        """Return the types that onnx infers for the outputs of a node of the model or of a graph in it.

        Raises:
            Unknown: the type of an input is unknown.
            OnnxgradError: the node contradicts itself.
        """
        try:
            return self._output_types.infer(node, [self.val(name) if name else None for name in node.input])
        except InternalError as error:
            label = node.name or next(iter(node.output), "")
            raise unreadable(f"the model contradicts itself: {error.__cause__}", f"see node '{label}'") from error

    def schema(self, op_type: str, domain: str = "") -> onnx.defs.OpSchema:
        """Return the schema of an operator at the graph's opset."""
        return self._output_types.schema(op_type, domain)

    def attributes(self, op_type: str, domain: str = "") -> dict[str, Any]:
        """Return attribute -> its default (None if it has none) for an operator; {} if the operator has no schema."""
        return self._output_types.attributes(op_type, domain)

    # -- names ----------------------------------------------------------------------------------------------

    def rename(self, value: Val, name: str) -> Val:
        """Rename a result of this emitter. Any other value, or a value that was renamed before, is copied instead."""
        self.rename_all({name: value})
        return self.val(name)

    def rename_all(self, results: Mapping[str, Val]) -> None:
        """Rename results of this emitter.

        A value that gets several names, that was renamed before or that is not a result of this emitter is copied by an
        Identity.

        Args:
            results: new name -> value.
        """
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
        """Clear the references to the written nodes and values, after the caller has taken the nodes.

        Values refer to their emitter, and the emitter to its values. The garbage collector is off during a build, so
        this cycle would stay in memory.
        """
        self.nodes = []
        for known in (self._vals, self._constants, self._written, self._renamed):
            known.clear()


def _attribute(name: str, value: Any) -> tuple[AttributeProto, bytes]:
    """Return an attribute of a node, and its bytes. Attributes of strings and integers are cached."""
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
