"""The types of the outputs of a node that is being emitted: by a look at the operands, or as onnx infers them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
from onnx import TypeProto

from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.errors import InternalError, Unknown
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node, as_message
from onnxgrad_cli.ir.types import Dim, dtype_of, tensor_type

ELEMENTWISE = frozenset("Add Div Exp Mul Neg Reciprocal Sigmoid Sqrt Sub Tanh".split())
"""Operators whose result has the type of an operand, but for broadcasting."""

SAME_DTYPE = frozenset("Expand ReduceMax ReduceMean ReduceSum Reshape".split())
"""Operators whose result has the element type of their first operand, so that a shape is all that is to be known."""

TYPED_AS = {"GreaterOrEqual": "Greater", "LessOrEqual": "Less"}
"""Operators for which onnx infers no shape before opset 16 -> others that have the same types."""


class OutputTypes:
    """Finds the types of nodes' outputs at the opsets of one graph.

    A type is one object for all values that have it, and every size in it is a number or a symbol of its own.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._imports = list(graph.proto.opset_import)
        self._types: dict[tuple[Dim | None, ...], TypeProto] = {}
        self._schemas: dict[tuple[str, str], onnx.defs.OpSchema] = {}
        self._defaults: dict[tuple[str, str], dict[str, Any]] = {}

    def at_a_glance(
        self, op_type: str, operands: Sequence[Val | None], shape: Sequence[Dim | None] | None
    ) -> TypeProto | None:
        """The type of a node's only output, where it follows from the operands without inference; else None."""
        if not operands or (first := operands[0]) is None:
            return None
        if op_type in ELEMENTWISE and (last := operands[-1]) is not None:
            like = _elementwise(first, last)
            if like is not None:
                return like.type
        return self._tensor(first.dtype, shape) if shape is not None and op_type in SAME_DTYPE else None

    def _tensor(self, dtype: int, shape: Sequence[Dim | None]) -> TypeProto:
        """The type of a tensor: one object for all values of it, where each size is known or has a symbol."""
        key = (dtype, *shape)
        if key not in self._types:
            value_type = self._graph.named(tensor_type(dtype, shape))
            if None in shape or "?" in shape:
                return value_type
            self._types[key] = self._graph.shared(value_type)
        return self._types[key]

    def infer(
        self, node: Node, operands: Sequence[Val | None], shape: Sequence[Dim | None] | None = None
    ) -> dict[str, TypeProto]:
        """The types of a node's outputs, as onnx infers them from those of its operands.

        Args:
            node: the node.
            operands: its inputs.
            shape: the shape of the first output, where the caller knows more than onnx.

        Raises:
            Unknown: the type of an operand is unknown.
            InternalError: the operands don't fit the operator.
        """
        graph, schema = self._graph, self.schema(TYPED_AS.get(node.op_type, node.op_type), node.domain)
        types: dict[str, TypeProto] = {}
        for x in operands:
            if x is not None:
                if x.type is None:
                    raise Unknown(f"the type of '{x.name}' is unknown")
                types[x.name] = x.type
        data = {x.name: graph.initializers[x.name] for x in operands if x is not None and x.const is not None}
        infer = onnx.shape_inference.infer_node_outputs
        try:
            found = infer(schema, as_message(node), types, data, opset_imports=self._imports)
        except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError, KeyError, ValueError) as error:
            raise InternalError(f"internal: {node.name} does not type: {str(error).strip()} ({operands})") from error
        types = {name: graph.shared(graph.named(value_type)) for name, value_type in found.items()}
        if shape is not None:
            name = node.output[0]
            types[name] = graph.named(tensor_type(dtype_of(types[name]), shape))
        return types

    def schema(self, op_type: str, domain: str = "") -> onnx.defs.OpSchema:
        """The schema of an operator at the graph's opset."""
        key = (op_type, domain)
        if key not in self._schemas:
            self._schemas[key] = onnx.defs.get_schema(op_type, self._graph.opset(domain) or 1, domain)
        return self._schemas[key]

    def attributes(self, op_type: str, domain: str = "") -> dict[str, Any]:
        """The attributes of an operator with their defaults (None where there is none); {} without a schema."""
        key = (op_type, domain)
        if key not in self._defaults:
            try:
                schema = self.schema(op_type, domain)
            except onnx.defs.SchemaError:
                return self._defaults.setdefault(key, {})
            given = {name: attribute.default_value for name, attribute in schema.attributes.items()}
            values = {name: onnx.helper.get_attribute_value(a) if a.type else None for name, a in given.items()}
            self._defaults[key] = {k: v.decode() if isinstance(v, bytes) else v for k, v in values.items()}
        return self._defaults[key]


def _elementwise(a: Val, b: Val) -> Val | None:
    """The operand that has the type of an elementwise result; None where that takes more than a look."""
    left, right = a.known_shape, b.known_shape
    if left is None or right is None or "?" in left or "?" in right:
        return None
    lead = len(left) - len(right)
    if lead >= 0 and (left[lead:] == right or set(right) == {1}):
        return a
    return b if lead < 0 and (right[-lead:] == left or set(left) == {1}) else None
