"""Custom gradients in the form that ONNX Runtime's training module took: lists of nodes and of the names they share.

A definition becomes a rule. It is checked whole when it is registered: what the older registry ignored, overrode or
found out when the graph was built is an error there.
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
from onnxgrad_cli.ir.types import is_float

Nodes = Sequence[tuple[Any, ...]]
"""(op | (op, domain), inputs, outputs, attributes) each; the attributes may be left out."""

Given = TypeVar("Given", bound="Nodes | Callable[[], Nodes]")

ATEN = "org.pytorch.aten"
FIRST_OPSET = 13
REFERENCE = re.compile(r"(GO|GI|I|O)\((\d+)\)")
ELEMENT = re.compile(r"([IO])ElemType\((\d+)\)")
KINDS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,), "string": (str,)}


def gradient_definition(
    domain: str, op_type: str, *attributes: str, override: bool = False
) -> Callable[[Given], Given]:
    """Register the gradient of an operator as a list of nodes, or decorate the function that returns the list.

    A node is `(op, inputs, outputs)` or `(op, inputs, outputs, attributes)`, where `op` is a name or `(name, domain)`.
    Inputs are `"I(i)"` and `"O(i)"`, the inputs and outputs of the forward node, `"GO(i)"`, the gradients of its
    outputs, `""` for none, or what an earlier node makes; outputs are `"GI(i)"`, the gradients of its inputs, or names.
    An attribute is `{"value": v, "dtype": t, "is_tensor": b}`, `t` being int, float, bool, string, `IElemType(i)` or
    `OElemType(i)`; a tensor has one axis, if it is one number too.

    As in a rule, a gradient may have the broadcast shape of the output, and is summed down to its input.

    Args:
        domain, op_type: the operator.
        attributes: the keys that the older registry took for PyTorch's ATen operators: refused.
        override: replace an existing rule instead of refusing.

    Raises:
        OnnxgradError: the definition is malformed, or the operator has a rule already.

    Source: the form is that of `onnxruntime.training.ortmodule`, where it was called `register_gradient`.
    """
    for argument, given in (("domain", domain), ("op_type", op_type)):
        checks.text(argument, given)
    if attributes or domain == ATEN:
        raise OnnxgradError(
            f"{'::'.join((domain, op_type, *attributes))}: a gradient of PyTorch's ATen operator",
            "onnxruntime has no such operator: export the model without the ATen fallback",
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
class _Node:
    """One node of a definition; `place` is what messages call it."""

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


class _Unfit(Exception):
    """Why a definition does not fit a node of a model."""


class _Definition:
    """A checked definition, called as a rule."""

    def __init__(self, domain: str, op_type: str, nodes: Nodes) -> None:
        self.label = f"the gradient definition of {full_name(op_type, domain)}"
        if not isinstance(nodes, (list, tuple)) or not nodes:
            self._wrong("is no list of nodes")
        self.schema = _schema(op_type, domain)
        if self.schema is None and is_standard(domain):
            self._wrong("is of an operator that does not exist")
        self.nodes = [self._node(position, node) for position, node in enumerate(nodes)]
        self._check_names()
        self.opsets = self._opsets()

    def _wrong(self, what: str, place: str = "") -> NoReturn:
        raise OnnxgradError(
            f"{self.label}{f', {place}' * bool(place)}: {what}",
            "a definition is a list of (op or (op, domain), inputs, outputs, attributes)",
        )

    # -- what is checked when it is registered ------------------------------------------------------------------

    def _node(self, position: int, given: Any) -> _Node:
        """The node of a list at a position, checked; a UsageError names what is wrong with it."""
        place = f"node {position}"
        if not isinstance(given, (list, tuple)) or len(given) not in (3, 4):
            self._wrong("is no (op, inputs, outputs) or (op, inputs, outputs, attributes)", place)
        named, inputs, outputs, attributes = (*given, {})[:4]
        pair = (named, "") if isinstance(named, str) else named
        if not _are_names(pair) or len(pair) != 2 or not pair[0]:
            self._wrong(f"{named!r} is no operator, and no (operator, domain)", place)
        op_type, domain = pair
        place = f"{place} ({op_type})"
        if domain == ATEN:
            self._wrong("is an operator of PyTorch, which onnxruntime does not have", place)
        if not _are_names(inputs) or not _are_names(outputs):
            self._wrong("its inputs and outputs are not lists of names", place)
        if not isinstance(attributes, Mapping):
            self._wrong("its attributes are no dictionary", place)
        for name, attribute in attributes.items():
            self._check_attribute(f"{place}, attribute {name!r}", attribute)
        return _Node(place, op_type, plain_domain(domain), tuple(inputs), tuple(outputs), attributes)

    def _check_attribute(self, place: str, given: Any) -> None:
        """Make sure that an attribute is a value and a type, and that both fit."""
        if not isinstance(given, Mapping) or not {"value", "dtype"} <= given.keys() <= {"value", "dtype", "is_tensor"}:
            self._wrong("is no {'value': ..., 'dtype': ..., 'is_tensor': ...}", place)
        dtype, tensor = given["dtype"], given.get("is_tensor", False)
        element = ELEMENT.fullmatch(str(dtype))
        if element:
            self._check_index(place, element[1], int(element[2]))
        elif dtype not in KINDS:
            self._wrong(f"the dtype {dtype!r} is none of {', '.join(KINDS)}, IElemType(i), OElemType(i)", place)
        values = given["value"] if isinstance(given["value"], (list, tuple)) else [given["value"]]
        kinds = KINDS["float"] if element else KINDS[dtype]
        if not all(isinstance(v, kinds) and isinstance(v, bool) == (dtype == "bool") for v in values):
            self._wrong(f"{given['value']!r} is no {dtype}, and no list of such", place)
        if dtype == ("string" if tensor else "bool"):
            self._wrong(f"{'a tensor' if tensor else 'an attribute'} of type {dtype} is not known", place)

    def _check_names(self) -> None:
        """Each name is made once, before it is read; each reference is one; and some gradient is made."""
        made: set[str] = set()
        for node in self.nodes:
            for name in filter(None, node.inputs):
                self._check_input(node, name, made)
            for name in filter(None, node.outputs):
                self._check_output(node, name)
                if name in made:
                    self._wrong(f"it makes '{name}', which is made already", node.place)
                made.add(name)
        if not any(REFERENCE.fullmatch(name) for name in made):
            self._wrong("makes no GI(i)")

    def _check_input(self, node: _Node, name: str, made: set[str]) -> None:
        """Make sure that a node reads I(i), O(i) or GO(i), or what a node before it has made."""
        kind, index = self._reference(node, name)
        if kind == "GI":
            self._wrong(f"it reads {name}: GI(i) is an output", node.place)
        if kind:
            self._check_index(node.place, kind[-1], index)
        elif name not in made:
            later = any(name in other.outputs for other in self.nodes)
            why = "is made by no node before it" if later else "is neither I, O, GO nor made by a node"
            self._wrong(f"its input '{name}' {why}", node.place)

    def _check_output(self, node: _Node, name: str) -> None:
        """Make sure that a node makes GI(i), or a value of a type that onnx can tell."""
        kind, index = self._reference(node, name)
        if kind not in ("", "GI"):
            self._wrong(f"it makes {name}: an output is GI(i) or a name", node.place)
        if kind:
            self._check_index(node.place, "I", index)
        elif _schema(node.op_type, node.domain) is None:
            full = f"{node.domain}::{node.op_type}"
            self._wrong(f"onnx knows no {full}, so its outputs have a type as GI(i) only, not '{name}'", node.place)

    def _reference(self, node: _Node, name: str) -> tuple[str, int]:
        found = REFERENCE.fullmatch(name)
        if not found and ("(" in name or ")" in name):
            self._wrong(f"'{name}' is none of I(i), O(i), GO(i), GI(i)", node.place)
        return (found[1], int(found[2])) if found else ("", 0)

    def _check_index(self, place: str, kind: str, index: int) -> None:
        if self.schema is None:
            return
        count = self.schema.max_input if kind == "I" else self.schema.max_output
        if index >= count:
            what = "input" if kind == "I" else "output"
            self._wrong(f"the operator has no {what} {index}: there are {count}", place)

    def _opsets(self) -> list[int]:
        """The opsets of the default domain at which all nodes are valid."""
        opsets = list(range(FIRST_OPSET, NEWEST_OPSET + 1))
        for node in self.nodes:
            if node.domain:
                continue
            schemas = {opset: _schema(node.op_type, "", opset) for opset in opsets}
            opsets = [opset for opset, schema in schemas.items() if schema is not None and node.fits(schema)]
            if not opsets:
                span = f"{FIRST_OPSET} to {NEWEST_OPSET}"
                self._wrong(f"with these inputs, outputs and attributes it is valid at none of the opsets {span}, or "
                            "none at which the nodes before it are", node.place)  # fmt: skip
        return opsets

    # -- what is written when a model is differentiated -----------------------------------------------------------

    def __call__(
        self, op: Op, gs: Sequence[Val | None], ys: Sequence[Val | None], xs: Sequence[Val | None]
    ) -> list[Any]:
        wanted = [i for i, x in enumerate(xs) if op.wants(x)]
        try:
            made = self._emit(op, gs, ys, xs, {f"GI({i})" for i in wanted})
        except _Unfit as reason:
            refusal = op.no(f"{reason}", "mend the definition, or write a rule instead")
            return [refusal if i in wanted else None for i in range(len(xs))]
        return [made.get(f"GI({i})") for i in range(len(xs))]

    def _emit(
        self, op: Op, gs: Sequence[Val | None], ys: Sequence[Val | None], xs: Sequence[Val | None], wanted: set[str]
    ) -> dict[str, Val]:
        """Emit the gradient nodes that the wanted gradients need; returns their results, by name."""
        if op.opset not in self.opsets:
            raise _Unfit(f"{self.label} is valid at the opsets {self.opsets}, the model is at {op.opset}")
        outputs = {name for node in self.nodes for name in node.outputs}
        excess = [name for name in sorted(outputs) if self.schema is None and _index(name) >= len(xs)]
        if excess:
            raise _Unfit(f"{self.label} makes {excess[0]}, the node has {len(xs)} inputs")
        missing = sorted(wanted - outputs)
        if missing:
            raise _Unfit(f"{self.label} does not make {missing[0]}, which is needed")
        forward = _Forward(op, gs, ys, xs)
        made: dict[str, Val] = {}
        for node in self._needed(wanted):
            inputs = [made[name] if name in made else forward.value(name) for name in node.inputs]
            attributes = {name: _value(given, forward) for name, given in node.attributes.items()}
            results = self._written(op, node, inputs, attributes, forward)
            made.update((name, value) for name, value in zip(node.outputs, results, strict=True) if name)
        return made

    def _needed(self, wanted: set[str]) -> list[_Node]:
        chosen, names = [], set(wanted)
        for node in reversed(self.nodes):
            if names.intersection(node.outputs):
                chosen.append(node)
                names.update(node.inputs)
        return chosen[::-1]

    def _written(
        self, op: Op, node: _Node, inputs: list[Val | None], attributes: dict[str, Any], forward: _Forward
    ) -> Sequence[Val]:
        """Emit one gradient node; without a schema its results have the types of the gradients' inputs."""
        if node.op_type == "Constant" and not node.domain and isinstance(attributes.get("value"), onnx.TensorProto):
            return [op.const(numpy_helper.to_array(attributes["value"]))]
        types = None
        if _schema(node.op_type, node.domain) is None:
            likes = [forward.value(f"I({_index(name)})", optional=True) if name else None for name in node.outputs]
            types = [like.type if like is not None and like.type is not None else onnx.TypeProto() for like in likes]
        try:
            found = op.emit(
                node.op_type, *inputs, outputs=len(node.outputs), domain=node.domain, types=types, **attributes
            )
        except (OnnxgradError, onnx.checker.ValidationError) as error:
            raise _Unfit(f"{self.label}, {node.place}: {str(error).strip()}") from error
        return found if len(node.outputs) > 1 else [found]


@dataclass(frozen=True)
class _Forward:
    """The forward node: what `I(i)`, `O(i)` and `GO(i)` stand for."""

    op: Op
    gs: Sequence[Val | None]
    ys: Sequence[Val | None]
    xs: Sequence[Val | None]

    def value(self, name: str, optional: bool = False) -> Val | None:
        found = REFERENCE.fullmatch(name)
        if not found:
            return None
        values = {"I": self.xs, "O": self.ys, "GO": self.gs}[found[1]]
        index = int(found[2])
        value = values[index] if index < len(values) else None
        if value is None and found[1] == "GO" and index < len(self.ys):
            like = self.value(f"O({index})")
            return self.op.fill(0.0, like) if like is not None and is_float(like.type) else None
        if value is None and not optional:
            raise _Unfit(f"its gradient definition reads {name}, which the node does not have")
        return value


def _value(given: Mapping[str, Any], forward: _Forward) -> Any:
    """An attribute as onnx takes it; a tensor of one number has one axis."""
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


def _index(name: str) -> int:
    """The i of a reference; -1 of a name."""
    found = REFERENCE.fullmatch(name)
    return int(found[2]) if found else -1


def _schema(op_type: str, domain: str, opset: int = NEWEST_OPSET) -> onnx.defs.OpSchema | None:
    try:
        return onnx.defs.get_schema(op_type, opset, plain_domain(domain))
    except onnx.defs.SchemaError:
        return None
