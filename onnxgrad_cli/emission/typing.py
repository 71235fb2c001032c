"""Find the types of the outputs of emitted nodes, from the types of the operands or by onnx's type inference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
from onnx import TypeProto

from onnxgrad_cli.emission.values import Val, require
from onnxgrad_cli.errors import InternalError
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node, as_message
from onnxgrad_cli.ir.node_values import schema_of
from onnxgrad_cli.ir.types import Dim, dtype_of, tensor_type

ELEMENTWISE = frozenset("Add Div Exp Mul Neg Reciprocal Sigmoid Sqrt Sub Tanh".split())
"""Operators whose result has the element type of the operands, and the shape to which they broadcast."""

SAME_DTYPE = frozenset("Expand ReduceMax ReduceMean ReduceSum Reshape".split())
"""Operators whose result has the element type of the first operand, so only its shape has to be found."""

TYPED_AS = {"GreaterOrEqual": "Greater", "LessOrEqual": "Less"}
"""Map from an operator whose shape onnx does not infer before opset 16 to an operator with the same result type."""


class OutputTypes:
    """Finds the types of nodes' outputs at the opsets of one graph.

    All values of equal type share one object. Every size in a type is a number or a named symbol.
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
        """Return the type of a node's only output without inference, or None if inference is needed.

        Args:
            op_type: the operator.
            operands: the inputs of the node.
            shape: the shape of the output, if the caller knows it.
        """
        if not operands or (first := operands[0]) is None:
            return None
        if op_type in ELEMENTWISE and (last := operands[-1]) is not None:
            like = _elementwise(first, last)
            if like is not None:
                return like.type
        return self._tensor(first.dtype, shape) if shape is not None and op_type in SAME_DTYPE else None

    def _tensor(self, dtype: int, shape: Sequence[Dim | None]) -> TypeProto:
        """Return the type of a tensor. Equal types are one object, unless a size has no name and gets a new symbol."""
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
        """Return the types that onnx infers for a node's outputs.

        Args:
            node: the node.
            operands: its inputs.
            shape: the shape of the first output, if the caller knows more than onnx infers.

        Raises:
            Unknown: the type of an operand is unknown.
            InternalError: the operands don't fit the operator.
        """
        graph, schema = self._graph, self.schema(TYPED_AS.get(node.op_type, node.op_type), node.domain)
        given = [x for x in operands if x is not None]
        types = {x.name: x.type for x in given if x.type is not None}
        for x in given:
            require(x.name in types, f"the type of '{x.name}' is unknown")
        data = {x.name: graph.initializers[x.name] for x in given if x.const is not None}
        infer = onnx.shape_inference.infer_node_outputs
        try:
            found = infer(schema, as_message(node), types, data, opset_imports=self._imports)
        except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError, KeyError, ValueError) as error:
            text = f"internal: can't infer the output types of {node.name}: {str(error).strip()} ({operands})"
            raise InternalError(text) from error
        types = {name: graph.shared(graph.named(value_type)) for name, value_type in found.items()}
        if shape is not None:
            name = node.output[0]
            types[name] = graph.named(tensor_type(dtype_of(types[name]), shape))
        return types

    def schema(self, op_type: str, domain: str = "") -> onnx.defs.OpSchema:
        """Return the schema of an operator at the graph's opset."""
        key = (op_type, domain)
        if key not in self._schemas:
            self._schemas[key] = onnx.defs.get_schema(op_type, self._graph.opset(domain) or 1, domain)
        return self._schemas[key]

    def attributes(self, op_type: str, domain: str = "") -> dict[str, Any]:
        """Return attribute -> its default (None if it has none) for an operator; {} if the operator has no schema."""
        key = (op_type, domain)
        if key not in self._defaults:
            schema = schema_of(op_type, self._graph.opset(domain) or 1, domain)
            given = {name: attribute.default_value for name, attribute in schema.attributes.items()} if schema else {}
            values = {name: onnx.helper.get_attribute_value(a) if a.type else None for name, a in given.items()}
            self._defaults[key] = {k: v.decode() if isinstance(v, bytes) else v for k, v in values.items()}
        return self._defaults[key]


def _elementwise(a: Val, b: Val) -> Val | None:
    """Return the operand that has the shape to which `a` and `b` broadcast, or None if the types do not show that."""
    left, right = a.known_shape, b.known_shape
    if left is None or right is None or "?" in left or "?" in right:
        return None
    lead = len(left) - len(right)
    if lead >= 0 and (left[lead:] == right or set(right) == {1}):
        return a
    return b if lead < 0 and (right[-lead:] == left or set(left) == {1}) else None
