"""Custom gradients in the form of ONNX Runtime's training module: lists of nodes and the names of their values.

Such a list, called a gradient definition, is registered as a gradient rule. It is checked completely when it is
registered. Mistakes that ONNX Runtime's registry ignores, overrides or finds only when it builds a graph raise errors
here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import numpy as np
import onnx
from onnx import numpy_helper

from onnxgrad_cli.autodiff.registry import NEWEST_OPSET, rule
from onnxgrad_cli.common import checks
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.ir.domains import full_name, is_standard, plain_domain
from onnxgrad_cli.ir.node_values import schema_of
from onnxgrad_cli.ir.types import is_float

Nodes = Sequence[tuple[Any, ...]]
"""Nodes as (operator, inputs, outputs, attributes). The operator is a name or (name, domain).

The attributes may be left out.
"""

Given = TypeVar("Given", bound="Nodes | Callable[[], Nodes]")

ATEN = "org.pytorch.aten"
FIRST_OPSET = 13
REFERENCE = re.compile(r"(GO|GI|I|O)\((\d+)\)")
ELEMENT = re.compile(r"([IO])ElemType\((\d+)\)")
KINDS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,), "string": (str,)}


def gradient_definition(
    domain: str, op_type: str, *attributes: str, override: bool = False
) -> Callable[[Given], Given]:
    """Return a function that registers a list of nodes, or a function that returns the list, as an operator's gradient.

    A node is `(op, inputs, outputs)` or `(op, inputs, outputs, attributes)`, where `op` is a name or `(name, domain)`.

    - Inputs of a node are `"I(i)"` and `"O(i)"`, the inputs and outputs of the forward node, and `"GO(i)"`, the
      gradients of its outputs. An input may also be an output of an earlier node, or `""` for an omitted input.
    - Outputs are `"GI(i)"`, the gradients of the forward node's inputs, or names.
    - An attribute is `{"value": v, "dtype": t, "is_tensor": b}`. `t` is int, float, bool, string, `IElemType(i)` or
      `OElemType(i)`. A tensor has one axis, even if it is a single number.

    If an input is broadcast, its gradient may have the shape of the output, and is summed to the shape of the input.

    Args:
        domain: the domain of the operator.
        op_type: the operator.
        attributes: must be empty. ONNX Runtime's registry takes keys for PyTorch's ATen operators here.
        override: replace an existing rule instead of raising an error.

    Raises:
        OnnxgradError: the definition is malformed, or the operator has a rule already.

    Source: the form is from `onnxruntime.training.ortmodule`, where the function was `register_gradient`.
    """
    for argument, given in (("domain", domain), ("op_type", op_type)):
        checks.text(argument, given)
    if attributes or domain == ATEN:
        hint = "onnxruntime has no such operator: export the model without the ATen fallback"
        raise OnnxgradError(
            f"{'::'.join((domain, op_type, *attributes))} is a gradient of PyTorch's ATen operator", hint
        )

    def register(given: Given) -> Given:
        nodes: Any = given() if callable(given) else given
        definition = _Definition(domain, op_type, nodes)

        def gradient(op: Op, gs: Sequence[Val | None], ys: Sequence[Val | None], *xs: Val | None) -> list[Any]:
            return definition(op, gs, ys, xs)

        gradient.__module__ = getattr(given, "__module__", __name__)
        gradient.__qualname__ = getattr(given, "__qualname__", f"gradient_definition of {op_type}")
        rule(op_type, domain=domain, needs_opset=definition.opsets[0], override=override)(gradient)
        return given

    return register


@dataclass(frozen=True)
class _DefinitionNode:
    """One node of a definition. `place` identifies the node in messages."""

    place: str
    op_type: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Mapping[str, Any]]

    def fits(self, schema: onnx.defs.OpSchema) -> bool:
        required = {name for name, attribute in schema.attributes.items() if attribute.required}
        return (
            required <= self.attributes.keys() <= schema.attributes.keys()
            and schema.min_input <= len(self.inputs) <= schema.max_input
            and schema.min_output <= len(self.outputs) <= schema.max_output
        )


class _DefinitionMismatch(Exception):
    """The reason why a definition does not fit a node of a model."""


class _Definition:
    """A checked definition, which is called as a rule."""

    def __init__(self, domain: str, op_type: str, nodes: Nodes) -> None:
        self.label = f"the gradient definition of {full_name(op_type, domain)}"
        if not isinstance(nodes, (list, tuple)) or not nodes:
            self._wrong("it is not a list of nodes")
        self.schema = schema_of(op_type, NEWEST_OPSET, domain)
        if self.schema is None and is_standard(domain):
            self._wrong("the operator does not exist")
        self.nodes = [self._node(position, node) for position, node in enumerate(nodes)]
        self._check_names()
        self.opsets = self._opsets()

    def _wrong(self, what: str, place: str = "") -> NoReturn:
        hint = "write a definition as a list of (op or (op, domain), inputs, outputs, attributes)"
        raise OnnxgradError(f"{self.label}{f', {place}' * bool(place)}: {what}", hint)

    # -- checks at registration ---------------------------------------------------------------------------------

    def _node(self, position: int, given: Any) -> _DefinitionNode:
        """Check and return the node at a position of the list.

        Raises:
            OnnxgradError: the node is malformed. The error describes its first mistake.
        """
        place = f"node {position}"
        if not isinstance(given, (list, tuple)) or len(given) not in (3, 4):
            self._wrong("it is neither (op, inputs, outputs) nor (op, inputs, outputs, attributes)", place)
        named, inputs, outputs, attributes = (*given, {})[:4]
        pair = (named, "") if isinstance(named, str) else named
        if not _are_names(pair) or len(pair) != 2 or not pair[0]:
            self._wrong(f"{named!r} is neither an operator nor (operator, domain)", place)
        op_type, domain = pair
        place = f"{place} ({op_type})"
        if domain == ATEN:
            self._wrong("it is an operator of PyTorch, which onnxruntime does not have", place)
        if not _are_names(inputs) or not _are_names(outputs):
            self._wrong("its inputs and outputs are not lists of names", place)
        if not isinstance(attributes, Mapping):
            self._wrong("its attributes are not a dictionary", place)
        for name, attribute in attributes.items():
            self._check_attribute(f"{place}, attribute {name!r}", attribute)
        return _DefinitionNode(place, op_type, plain_domain(domain), tuple(inputs), tuple(outputs), attributes)

    def _check_attribute(self, place: str, given: Any) -> None:
        """Raise OnnxgradError unless an attribute has a value and a type that match."""
        if not isinstance(given, Mapping) or not {"value", "dtype"} <= given.keys() <= {"value", "dtype", "is_tensor"}:
            self._wrong("it is not {'value': ..., 'dtype': ..., 'is_tensor': ...}", place)
        dtype, tensor = given["dtype"], given.get("is_tensor", False)
        element = ELEMENT.fullmatch(str(dtype))
        if element:
            self._check_index(place, element[1], int(element[2]))
        elif dtype not in KINDS:
            self._wrong(f"the dtype {dtype!r} is not one of {', '.join(KINDS)}, IElemType(i), OElemType(i)", place)
        values = given["value"] if isinstance(given["value"], (list, tuple)) else [given["value"]]
        kinds = KINDS["float"] if element else KINDS[dtype]
        if not all(isinstance(v, kinds) and isinstance(v, bool) == (dtype == "bool") for v in values):
            self._wrong(f"{given['value']!r} is neither of type {dtype} nor a list of that type", place)
        if dtype == ("string" if tensor else "bool"):
            self._wrong(f"{'a tensor' if tensor else 'an attribute'} of type {dtype} is not supported", place)

    def _check_names(self) -> None:
        """Check the names: each is computed once and before it is read, references exist, and a GI(i) is computed."""
        made: set[str] = set()
        for node in self.nodes:
            for name in (*node.inputs, *node.outputs):
                if set("()").intersection(name) and not REFERENCE.fullmatch(name):
                    self._wrong(f"'{name}' is not one of I(i), O(i), GO(i), GI(i)", node.place)
            for name in filter(None, node.inputs):
                self._check_input(node, name, made)
            for name in filter(None, node.outputs):
                self._check_output(node, name)
                if name in made:
                    self._wrong(f"it makes '{name}' a second time", node.place)
                made.add(name)
        if not any(_reference(name)[0] for name in made):
            self._wrong("it makes no GI(i)")

    def _check_input(self, node: _DefinitionNode, name: str, made: set[str]) -> None:
        """Check that an input of a node is I(i), O(i), GO(i), or an output of an earlier node."""
        kind, index = _reference(name)
        if kind == "GI":
            self._wrong(f"it reads {name}, but GI(i) is an output", node.place)
        if kind:
            self._check_index(node.place, kind[-1], index)
        elif name not in made:
            later = any(name in other.outputs for other in self.nodes)
            why = "is not made by an earlier node" if later else "is neither I, O, GO nor made by a node"
            self._wrong(f"its input '{name}' {why}", node.place)

    def _check_output(self, node: _DefinitionNode, name: str) -> None:
        """Check that an output of a node is GI(i), or a name whose type onnx can infer."""
        kind, index = _reference(name)
        if kind not in ("", "GI"):
            self._wrong(f"it makes {name}, but an output must be GI(i) or a name", node.place)
        if kind:
            self._check_index(node.place, "I", index)
        elif schema_of(node.op_type, NEWEST_OPSET, node.domain) is None:
            full = f"{node.domain}::{node.op_type}"
            self._wrong(f"onnx does not know {full}, so its outputs must be GI(i), not '{name}'", node.place)

    def _check_index(self, place: str, kind: str, index: int) -> None:
        if self.schema is None:
            return
        count = self.schema.max_input if kind == "I" else self.schema.max_output
        if index >= count:
            what = "input" if kind == "I" else "output"
            self._wrong(f"the operator has no {what} {index}, only {count}", place)

    def _opsets(self) -> list[int]:
        """Return the opsets of the default domain at which all nodes of the definition are valid."""
        opsets = list(range(FIRST_OPSET, NEWEST_OPSET + 1))
        for node in self.nodes:
            if node.domain:
                continue
            schemas = {opset: schema_of(node.op_type, opset) for opset in opsets}
            opsets = [opset for opset, schema in schemas.items() if schema is not None and node.fits(schema)]
            if not opsets:
                what = "with these inputs, outputs and attributes it is valid at none of the opsets"
                self._wrong(f"{what} of the nodes before it, {FIRST_OPSET} to {NEWEST_OPSET}", node.place)
        return opsets

    # -- emission when a model is differentiated ------------------------------------------------------------------

    def __call__(
        self, op: Op, gs: Sequence[Val | None], ys: Sequence[Val | None], xs: Sequence[Val | None]
    ) -> list[Any]:
        wanted = [i for i, x in enumerate(xs) if op.wants(x)]
        try:
            made = self._emit(_Forward(op, gs, ys, xs), {f"GI({i})" for i in wanted})
        except _DefinitionMismatch as reason:
            refusal = op.no(f"{reason}", "correct the definition, or write a rule instead")
            return [refusal if i in wanted else None for i in range(len(xs))]
        return [made.get(f"GI({i})") for i in range(len(xs))]

    def _emit(self, forward: _Forward, wanted: set[str]) -> dict[str, Val]:
        """Emit the nodes that the wanted gradients need, and return name -> value for their results."""
        opset, count = forward.op.opset, len(forward.xs)
        if opset not in self.opsets:
            raise _DefinitionMismatch(f"{self.label} is valid at the opsets {self.opsets}, but the model has {opset}")
        outputs = {name for node in self.nodes for name in node.outputs}
        excess = [name for name in sorted(outputs) if self.schema is None and _reference(name)[1] >= count]
        if excess:
            raise _DefinitionMismatch(f"{self.label} makes {excess[0]}, but the node has {count} inputs")
        missing = sorted(wanted - outputs)
        if missing:
            raise _DefinitionMismatch(f"{self.label} does not make {missing[0]}, which is needed")
        made: dict[str, Val] = {}
        for node in self._needed(wanted):
            inputs = [made[name] if name in made else forward.value(name) for name in node.inputs]
            results = self._written(node, inputs, forward)
            made.update((name, value) for name, value in zip(node.outputs, results, strict=True) if name)
        return made

    def _needed(self, wanted: set[str]) -> list[_DefinitionNode]:
        chosen, names = [], set(wanted)
        for node in reversed(self.nodes):
            if names.intersection(node.outputs):
                chosen.append(node)
                names.update(node.inputs)
        return chosen[::-1]

    def _written(self, node: _DefinitionNode, inputs: list[Val | None], forward: _Forward) -> Sequence[Val]:
        """Emit one node of the definition.

        If its operator has no schema, each result that is a GI(i) gets the type of the input I(i).
        """
        op, attributes = forward.op, {name: _value(given, forward) for name, given in node.attributes.items()}
        if node.op_type == "Constant" and not node.domain and isinstance(attributes.get("value"), onnx.TensorProto):
            return [op.const(numpy_helper.to_array(attributes["value"]))]
        types, count = None, len(node.outputs)
        if schema_of(node.op_type, NEWEST_OPSET, node.domain) is None:
            likes = [forward.value(name.replace("GI(", "I("), optional=True) for name in node.outputs]
            types = [like.type if like is not None and like.type is not None else onnx.TypeProto() for like in likes]
        try:
            found = op.emit(node.op_type, *inputs, outputs=count, domain=node.domain, types=types, **attributes)
        except (OnnxgradError, onnx.checker.ValidationError) as error:
            raise _DefinitionMismatch(f"{self.label}, {node.place}: {str(error).strip()}") from error
        return found if count > 1 else [found]


@dataclass(frozen=True)
class _Forward:
    """The forward node, with the values for `I(i)`, `O(i)` and `GO(i)`."""

    op: Op
    gs: Sequence[Val | None]
    ys: Sequence[Val | None]
    xs: Sequence[Val | None]

    def value(self, name: str, optional: bool = False) -> Val | None:
        kind, index = _reference(name)
        if not kind:
            return None
        values = {"I": self.xs, "O": self.ys, "GO": self.gs}[kind]
        value = values[index] if index < len(values) else None
        if value is None and kind == "GO" and index < len(self.ys):
            like = self.value(f"O({index})")
            return self.op.fill(0.0, like) if like is not None and is_float(like.type) else None
        if value is None and not optional:
            raise _DefinitionMismatch(f"its gradient definition reads {name}, which the node does not have")
        return value


def _value(given: Mapping[str, Any], forward: _Forward) -> Any:
    """Return the value of an attribute in the form that onnx accepts. A tensor gets at least one axis."""
    value, dtype = given["value"], given["dtype"]
    element = ELEMENT.fullmatch(dtype)
    if not given.get("is_tensor"):
        kind = {"int": int, "float": float, "string": str}.get(dtype, type(value))
        return [kind(v) for v in value] if isinstance(value, (list, tuple)) else kind(value)
    if element:
        like = forward.value(f"{element[1]}({element[2]})")
        assert like is not None
        numpy_type = onnx.helper.tensor_dtype_to_np_dtype(like.dtype)
    else:
        numpy_type = np.dtype({"int": np.int64, "float": np.float32, "bool": np.bool_}[dtype])
    return numpy_helper.from_array(np.atleast_1d(np.asarray(value, numpy_type)))


def _are_names(given: Any) -> bool:
    return isinstance(given, (list, tuple)) and all(isinstance(name, str) for name in given)


def _reference(name: str) -> tuple[str, int]:
    """Return the kind and the index of a reference, such as ("GO", 1) for GO(1), or ("", -1) for a plain name."""
    found = REFERENCE.fullmatch(name)
    return (found[1], int(found[2])) if found else ("", -1)
