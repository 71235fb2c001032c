"""Call the rule of a node with the operands and attributes that the rule requires, and check its results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx

from onnxgrad_cli.autodiff.activity import reads_by_position
from onnxgrad_cli.autodiff.registry import Rule, Signature
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import No, Val
from onnxgrad_cli.execution.session import attribute_defaults
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.node_values import captured
from onnxgrad_cli.ir.types import is_float


class Refused(Exception):
    """The reason why a rule does not cover a node."""


def call_rule(
    op: Op, node: Node, rule: Rule, gs: tuple[Val | None, ...], active: set[str]
) -> list[tuple[Val, Val | No]]:
    """Call a node's rule, which emits the cotangents of the node's operands.

    Args:
        op: the emitter for the rule.
        node: the forward node.
        rule: its rule, which has a function.
        gs: the cotangents of the node's outputs; None for an output without one.
        active: the values that may get a cotangent.

    Returns:
        The active operands, each with its cotangent. Operands whose derivative is zero by mathematics are left out.

    Raises:
        Refused: the rule does not cover the node's operands, attributes or outputs.
        Unknown: the rule needs a fact that is unknown at build time, such as a size.
    """
    asked, op.node = rule.signature, node
    names = reads_by_position(node)
    op.wanted = active.intersection(names).__contains__
    xs = _operands(op, node, asked, names, active)
    attributes, unknown = node_attributes(op, node, asked)
    if unknown:
        raise Refused(f"the gradient rule does not cover its attribute {unknown}")
    if not asked.all_cotangents and (gs[0] is None or any(gs[1:])):
        used = [name for name, g in zip(node.output, gs, strict=True) if g is not None]
        raise Refused(f"the gradient rule does not cover the gradient through its output {', '.join(used)}")
    ys = tuple([op.val(name) if name else None for name in node.output])
    assert rule.function is not None
    g, y = gs if asked.all_cotangents else gs[0], ys if asked.all_outputs else ys[0]
    result = rule.function(op, g, y, *xs, **attributes)
    cotangents = result if isinstance(result, (tuple, list)) else (result,)
    if len(names) > len(cotangents) and any(name in active for name in names[len(cotangents) :]):
        raise Refused(f"the gradient rule returns {len(cotangents)} cotangents, but the node has {len(xs)} inputs")
    triples = zip(names, xs, cotangents, strict=False)
    return [(x, g) for name, x, g in triples if name in active and x is not None and g is not None]


def _operands(op: Op, node: Node, asked: Signature, names: Sequence[str], active: set[str]) -> list[Val | None]:
    """Return a node's inputs, then its captured values, padded with None or cut to the number of the rule's inputs."""
    inputs = node.input
    xs: list[Val | None] = [op.val(name) if name else None for name in inputs]
    xs += map(op.val, captured(node))
    if asked.variadic:
        return xs
    if len(inputs) > asked.inputs and any(name in active for name in names[asked.inputs : len(inputs)]):
        raise Refused(f"the gradient rule has {asked.inputs} inputs, but the node has {len(xs)}")
    return (xs + [None] * asked.inputs)[: asked.inputs]


def node_attributes(op: Op, node: Node, asked: Signature) -> tuple[dict[str, Any], str | None]:
    """Return the attributes that a rule gets, and the text of an attribute that it does not cover, or None.

    Missing attributes get their defaults. A rule covers the attributes that are among its parameters. Any other
    attribute must have its default value, so that no attribute is ignored by accident. The default is taken from onnx's
    schema of the operator or, if there is none, from the schema of the installed onnxruntime.
    """
    if not (node.attribute or asked.attributes or asked.any_attribute):
        return {}, None
    defaults = {**asked.attributes, **op.attributes(node.op_type, node.domain)}
    values = dict(defaults)
    for attribute in node.attribute:
        name, value = attribute.name, onnx.helper.get_attribute_value(attribute)
        values[name] = value.decode(errors="replace") if isinstance(value, bytes) else value
        covered = asked.any_attribute or name in asked.attributes
        if not covered:
            known = defaults if name in defaults else attribute_defaults(node.op_type, node.domain)
            if known.get(name) != values[name]:
                return {}, f"{name}={values[name]!r}"
    if asked.any_attribute:
        return values, None
    return {name: values.get(name) for name in asked.attributes}, None


def shape_mismatch(cotangent: Val, x: Val) -> str:
    """Describe why a cotangent does not fit `x`, or return "".

    A cotangent fits if it has the element type of `x`, and the shape of `x` or a shape to which `x` broadcasts.
    """
    if cotangent.type is x.type and x.type is not None:
        return ""
    have, want = cotangent.known_shape, x.known_shape
    if is_float(x.type) and cotangent.dtype != x.dtype:
        types = [onnx.helper.tensor_dtype_to_string(v.dtype).removeprefix("TensorProto.") for v in (cotangent, x)]
        return f"its gradient rule returns a cotangent of type {types[0]} for '{x.name}', which has the type {types[1]}"
    if not x.is_tensor or have is None or want is None:
        return ""
    sizes = zip(have[::-1], want[::-1], strict=False)
    clash = any(isinstance(h, int) and isinstance(w, int) and w not in (1, h) for h, w in sizes)
    if clash or len(have) < len(want):
        return f"its gradient rule returns a cotangent of shape {list(have)} for '{x.name}', which has {list(want)}"
    return ""
