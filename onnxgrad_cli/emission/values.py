"""`Val`, a value of the graph with operators, as rules write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from onnx import TypeProto

from onnxgrad_cli.errors import Unknown
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.types import Shape, dtype_of


class Emitter(Protocol):
    """What a value needs of the emitter it belongs to: its graph, its nodes, and operators by their names."""

    graph: Graph
    nodes: list[Node]

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        """The operator of that name, which appends a node when it is called."""


class Val:
    """A value of the graph: its name, its type, and operators that emit nodes."""

    __slots__ = ("_shape", "name", "op", "type")
    __array_ufunc__ = None  # numpy scalars leave the operators to us

    def __init__(self, op: Emitter, name: str, value_type: TypeProto | None, shape: Shape | None) -> None:
        self.op = op
        self.name = name
        self.type = value_type
        self._shape = shape

    @property
    def dtype(self) -> int:
        """The element type (TensorProto.DataType)."""
        return dtype_of(self.type)

    @property
    def known_shape(self) -> Shape | None:
        """The dimensions, symbols as strings; None when the rank is unknown."""
        return self._shape

    @property
    def shape(self) -> Shape:
        """The dimensions, symbols as strings; raises Unknown when the rank is unknown."""
        if self._shape is None:
            raise Unknown(f"the rank of '{self.name}' is unknown")
        return self._shape

    @property
    def rank(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def is_tensor(self) -> bool:
        """Whether the value is a tensor, as far as is known: no sequence, no optional."""
        return self.type is None or self.type.HasField("tensor_type")

    @property
    def is_sequence(self) -> bool:
        """Whether the value is a sequence of tensors."""
        return self.type is not None and self.type.HasField("sequence_type")

    @property
    def const(self) -> np.ndarray | None:
        """The values, where they are known at build time."""
        return self.op.graph.constant(self.name)

    def __repr__(self) -> str:
        return f"Val({self.name}: {self._shape})"

    def __add__(self, other: Any) -> Val:
        return self.op.Add(self, other)

    def __radd__(self, other: Any) -> Val:
        return self.op.Add(other, self)

    def __sub__(self, other: Any) -> Val:
        return self.op.Sub(self, other)

    def __rsub__(self, other: Any) -> Val:
        return self.op.Sub(other, self)

    def __mul__(self, other: Any) -> Val:
        return self.op.Mul(self, other)

    def __rmul__(self, other: Any) -> Val:
        return self.op.Mul(other, self)

    def __truediv__(self, other: Any) -> Val:
        return self.op.Div(self, other)

    def __rtruediv__(self, other: Any) -> Val:
        return self.op.Div(other, self)

    def __pow__(self, other: Any) -> Val:
        return self.op.Pow(self, other)

    def __neg__(self) -> Val:
        return self.op.Neg(self)

    def __matmul__(self, other: Any) -> Val:
        return self.op.MatMul(self, other)

    def __lt__(self, other: Any) -> Val:
        return self.op.Less(self, other)

    def __le__(self, other: Any) -> Val:
        return self.op.LessOrEqual(self, other)

    def __gt__(self, other: Any) -> Val:
        return self.op.Greater(self, other)

    def __ge__(self, other: Any) -> Val:
        return self.op.GreaterOrEqual(self, other)


VALUES = {Val}
"""The set of types of operands that are values all."""


class No:
    """A cotangent that is refused: the reason is raised only if somebody wants it."""

    def __init__(self, reason: str, hint: str = "") -> None:
        self.reason = reason
        self.hint = hint
