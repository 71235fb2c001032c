"""The classes that rules use: `Val`, a value of the graph; `No`, a refusal; `Fusion`, one rule for several nodes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from onnx import TypeProto

from onnxgrad_cli.errors import Unknown
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.types import Shape, dtype_of


class Emitter(Protocol):
    """The part of an emitter that a `Val` uses: some attributes, and a method for each operator.

    Attributes:
        graph: the graph.
        nodes: the nodes emitted so far.
        in_function: True while a loss function of the user emits nodes.
    """

    graph: Graph
    nodes: list[Node]
    in_function: bool

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        """Return the operator with this name. A call of it appends a node."""


def _emits(op_type: str, swapped: bool = False) -> Callable[[Val, Any], Val]:
    """Return a method that emits an operator on the value and its argument; `swapped` puts the argument first."""

    def method(self: Val, other: Any) -> Val:
        return getattr(self.op, op_type)(other, self) if swapped else getattr(self.op, op_type)(self, other)

    return method


class Val:
    """A value of the graph: its name and its type. Python operators such as `+` emit nodes that read it."""

    __slots__ = ("_shape", "name", "op", "type")
    __array_ufunc__ = None  # makes numpy scalars use the operators of Val

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
        """The dimensions, symbols as strings; None if the rank is unknown."""
        return self._shape

    @property
    def shape(self) -> Shape:
        """The dimensions, symbols as strings.

        Raises:
            Unknown: the rank is unknown.
        """
        if self._shape is None:
            raise Unknown(f"the rank of '{self.name}' is unknown")
        return self._shape

    @property
    def rank(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def known_size(self, axis: int, what: str) -> int:
        """Return the size of an axis.

        Args:
            axis: the axis.
            what: a description of the size for the error, such as 'the hidden size'.

        Raises:
            Unknown: the size is known only at run time.
        """
        size = self.shape[axis]
        if not isinstance(size, int):
            raise Unknown(f"{what} is unknown")
        return size

    @property
    def is_tensor(self) -> bool:
        """Return True if the value is a tensor or its type is unknown, and False for a sequence or an optional."""
        return self.type is None or self.type.HasField("tensor_type")

    @property
    def is_sequence(self) -> bool:
        """Return True if the value is a sequence of tensors."""
        return self.type is not None and self.type.HasField("sequence_type")

    @property
    def const(self) -> np.ndarray | None:
        """The elements, or None if they are not known at build time."""
        return self.op.graph.constant(self.name)

    def __repr__(self) -> str:
        return f"Val({self.name}: {self._shape})"

    def __bool__(self) -> bool:
        """Return True, so that `if operand` is true for a value and false for None, an omitted operand.

        Raises:
            TypeError: a loss function asks for the truth of a value, which is not known at build time.
        """
        self._refuse_truth(
            "a value has no truth at build time: write op.Where, op.Max, op.Min, op.And, op.Or or op.Not in place of "
            "if, max, min, and, or, not, or a chain such as 0 < x < 1"
        )
        return True

    def __eq__(self, other: object) -> bool:
        """Return True for the same object.

        Raises:
            TypeError: a loss function compares values, which are not known at build time.
        """
        self._refuse_truth("values can't be compared at build time: write op.Equal(x, y) in place of x == y")
        return self is other

    __hash__ = object.__hash__

    def _refuse_truth(self, message: str) -> None:
        """Raise a TypeError if the caller's caller is a loss function of the user, and not code of onnxgrad."""
        if self.op.in_function and not sys._getframe(2).f_globals.get("__name__", "").startswith("onnxgrad_cli."):
            raise TypeError(message)

    def __neg__(self) -> Val:
        return self.op.Neg(self)

    __add__, __radd__ = _emits("Add"), _emits("Add", swapped=True)
    __sub__, __rsub__ = _emits("Sub"), _emits("Sub", swapped=True)
    __mul__, __rmul__ = _emits("Mul"), _emits("Mul", swapped=True)
    __truediv__, __rtruediv__ = _emits("Div"), _emits("Div", swapped=True)
    __pow__, __matmul__ = _emits("Pow"), _emits("MatMul")
    __lt__, __le__ = _emits("Less"), _emits("LessOrEqual")
    __gt__, __ge__ = _emits("Greater"), _emits("GreaterOrEqual")


VALUES = {Val}
"""The set of the Python types of a node's operands, if all of them are `Val`s."""


def require(holds: object, otherwise: str, hint: str = "") -> None:
    """Raise `Unknown` unless a condition holds that a rule or definition needs."""
    if not holds:
        raise Unknown(otherwise, hint)


@dataclass(frozen=True)
class No:
    """A refusal, which a rule returns in place of a cotangent that it can't compute.

    The build fails with `reason` and `hint` if the cotangent is needed.
    """

    reason: str
    hint: str = ""


class Fusion(NamedTuple):
    """One rule for several nodes that together compute a value. It is used in place of the rules of the single nodes.

    Attributes:
        operator: the operator that the nodes are equivalent to, as 'domain::Op'.
        inputs: the values that get a cotangent.
        saved: other values of these nodes that the rule reads.
        function: `rule(op, g, *inputs, *saved)`, which returns a cotangent for each input.
        convolved: a rule that also covers the 1x1 convolution of x with w that computes the first input, or None. It is
            `rule(op, g, x, w, *inputs[1:], *saved)`, and returns a cotangent for x, w and each of inputs[1:].
        kink: the convention at points where the value has no derivative.
    """

    operator: str
    inputs: tuple[str, ...]
    saved: tuple[str, ...]
    function: Callable[..., Any]
    convolved: Callable[..., Any] | None = None
    kink: str = ""
