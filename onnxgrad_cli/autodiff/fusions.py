"""Find groups of nodes that one rule differentiates: decomposed Gelus, angles, and nodes after a convolution.

A Gelu that an exporter decomposed is differentiated by Gelu's rule. The rules of the single nodes would read the result
of each node, but Gelu's rule reads only Gelu's input and sometimes its output. If no other result is read by the
backward part, onnxruntime can fuse the nodes of the Gelu.

An angle is atan(y / x). It has a gradient at x = 0, where the rule of the division y / x would divide by zero.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping
from functools import wraps

from onnxgrad_cli.autodiff import registry
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Fusion, Val
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.node_values import attributes_of
from onnxgrad_cli.ir.types import HALVES, dtype_of, shape_of

CLOSE = 1e-6
"""Largest relative error of a constant in a model for which the constant counts as the formula's exact constant."""

CORES = {"Erf": math.sqrt(0.5), "Tanh": math.sqrt(2 / math.pi)}
"""Map from the operator inside a decomposed Gelu, Erf or Tanh, to the constant by which its operand is multiplied."""

ORIGIN = "for a quotient of two values: 0 if both are 0"
"""The description of the convention at the origin, for the user."""

Monomial = tuple[float, list[str]]
"""A product of a number and values: (number, names of the values; a repeated name is a power)."""


def find_fusions(graph: Graph, kept: Collection[str]) -> dict[str, Fusion]:
    """Find nodes that together compute a Gelu or an angle. Return a map from their result to their fusion.

    Args:
        graph: the forward graph.
        kept: values whose cotangents are requested or given. They are never inner values of a fusion.
    """
    gelus, angles = _gelu_candidates(graph), _angle_candidates(graph)
    if not gelus and not angles:
        return {}
    formulas = _Formulas(graph, kept)
    return dict(filter(None, [*itertools.starmap(formulas.gelu, gelus), *map(formulas.angle, angles)]))


def _gelu_candidates(graph: Graph) -> list[tuple[Node, Node]]:
    """Return pairs of nodes: an Erf or Tanh, and the Add that adds 1 to its result."""
    cores = {node.output[0]: node for node in graph.nodes if node.op_type in CORES and not node.domain}
    sums = [node for node in graph.nodes if node.op_type == "Add" and not cores.keys().isdisjoint(node.input[:])]
    by_one = [node for node in sums if 1.0 in (_number(graph, name) for name in node.input)]
    if not by_one or any(map(_is_changed, ("Add", "Div", "Erf", "Mul", "Pow", "Tanh"))):
        return []
    return [(cores[name], node) for node in by_one for name in node.input if name in cores]


def _angle_candidates(graph: Graph) -> list[Node]:
    found = [node for node in graph.nodes if node.op_type == "Atan" and is_standard(node.domain)]
    return [] if found and any(map(_is_changed, ("Atan", "Div", "Mul", "Reciprocal"))) else found


def with_convolutions(graph: Graph, fusions: Mapping[str, Fusion], kept: Collection[str]) -> dict[str, Fusion]:
    """Add the convolution before a fusion to it, if its gradient then takes fewer passes over memory.

    Args:
        graph: the forward graph.
        fusions: map from a result to its fusion. Only fusions with a rule `convolved` can include a convolution.
        kept: values whose cotangents are requested or given. The result of the convolution must not be one of them.

    Returns:
        The fusions, some of which include their convolution.
    """
    found, kept = dict(fusions), graph.held.union(kept)
    able = {y: fusion for y, fusion in fusions.items() if fusion.convolved is not None}
    makers = graph.producers() if able and not _is_changed("Conv") else {}
    for y, fusion in able.items():
        between, *others = fusion.inputs
        node = makers.get(between)
        if node is not None and fusion.convolved and between not in kept and _widens(graph, node):
            inputs = (*node.input[:2], *others)
            found[y] = fusion._replace(inputs=inputs, function=fusion.convolved)
    return found


def _widens(graph: Graph, node: Node) -> bool:
    """Return True if a node is a 1x1 convolution of large images that at least doubles the number of channels.

    An image must have at least twice as many pixels as there are input channels. The products of the input images with
    themselves, which the rule computes, then cost less than passes over the larger results.
    """
    if node.op_type != "Conv" or not is_standard(node.domain) or len([name for name in node.input if name]) != 2:
        return False
    weight, images = (shape_of(graph.types.get(name)) or () for name in (node.input[1], node.output[0]))
    attributes, sizes = attributes_of(node), [size for size in (*weight, *images[2:]) if isinstance(size, int)]
    known = len(weight) > 2 and len(sizes) == len(weight) + len(images) - 2
    if not known or dtype_of(graph.types.get(node.output[0])) in HALVES:
        return False
    outer, inner, *kernel = sizes[: len(weight)]
    whole = {*kernel, *attributes.get("strides", ()), attributes.get("group", 1)} == {1}
    plain = whole and not any(attributes.get("pads", ()))
    return plain and outer >= 2 * inner > 0 and math.prod(sizes[len(weight) :]) >= 2 * inner


def _gelu_fusion(x: str, y: str, approximate: str) -> Fusion:
    """Return the fusion of the nodes that compute y = Gelu(x), which are differentiated by the rule of Gelu."""
    rule = registry.lookup("Gelu")
    assert rule is not None and rule.function is not None
    function = rule.function

    @wraps(function)
    def through(op: Op, g: Val, x: Val, y: Val | None = None) -> tuple[Val]:
        return (function(op, g, y, x, approximate=approximate),)

    return Fusion("ai.onnx::Gelu", (x,), (y,) if approximate == "tanh" else (), through)


def angle_gradient(op: Op, g: Val, y: Val, x: Val) -> tuple[Val | None, Val | None]:
    """Return the cotangents of y and x for atan(y / x): g x / (x² + y²) and -g y / (x² + y²), finite at x = 0.

    x and y are divided by the larger absolute value first, so that no square overflows or underflows. The gradient at
    the origin is 0, as for atan2 in PyTorch.
    """
    larger = op.Max(op.Abs(y), op.Abs(x))
    at_origin, one = op.Equal(larger, 0.0), op.const(1.0, larger)
    larger = op.Where(at_origin, one, larger)
    a, b = x / larger, y / larger
    share = g / (larger * op.Where(at_origin, one, a * a + b * b))
    dy = op.sum_to(share * a, y) if op.wants(y) else None
    return dy, -op.sum_to(share * b, x) if op.wants(x) else None


def _is_changed(op_type: str) -> bool:
    """Return True if an operator no longer has its built-in rule, or has an operand at which gradients stop."""
    rule = registry.lookup(op_type)
    ours = rule is not None and rule.source.startswith("onnxgrad_cli.autodiff.rules.")
    return not ours or bool(registry.stopped(op_type, ""))


def _number(graph: Graph, name: str) -> float | None:
    """Return the only element of a constant, or None if the value is not a constant with one element."""
    array = graph.constant(name)
    return float(array.reshape(())) if array is not None and array.size == 1 else None


class _Formulas:
    """Recognizes formulas in a graph. An inner result counts as part of a formula only if a single node reads it."""

    def __init__(self, graph: Graph, kept: Collection[str]) -> None:
        self.graph, self.kept = graph, {*kept, *graph.output_names}
        self.makers, self.uses = graph.producers(), graph.uses()

    def gelu(self, core: Node, one_more: Node) -> tuple[str, Fusion] | None:
        """Find the Gelu that contains an Erf or a Tanh.

        The form with Erf is x (1 + erf(x / sqrt 2)) / 2. The form with Tanh is
        x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2.

        Args:
            core: the Erf or Tanh.
            one_more: the Add that adds 1 to its result.

        Returns:
            The name of the result and the fusion, or None if the formula is not a Gelu.
        """
        x = self.operand(core)
        if not x or not self.is_private(core.output[0]):
            return None
        factors, node = sorted([x, one_more.output[0]]), one_more
        while (above := self.reader(node.output[0], "Mul", "Div")) is not None:
            node, y = above, above.output[0]
            number, values = self.monomial(y)
            if math.isclose(number, 0.5, rel_tol=CLOSE) and sorted(values) == factors and self.alike(x, y):
                return y, _gelu_fusion(x, y, "tanh" if core.op_type == "Tanh" else "none")
        return None

    def angle(self, atan: Node) -> tuple[str, Fusion] | None:
        """Return the result and the fusion of an Atan of a quotient, or None. The divisor must not be a constant."""
        node = self.makers.get(atan.input[0])
        if node is None or not is_standard(node.domain) or not self.is_private(atan.input[0]):
            return None
        if node.op_type == "Div":
            y, x = node.input
        elif node.op_type == "Mul" and (inverse := self._inverse(node)):
            y, x = inverse
        else:
            return None
        if self.graph.constant(x) is not None:
            return None
        return atan.output[0], Fusion("ai.onnx::Atan", (y, x), (), angle_gradient, kink=ORIGIN)

    def _inverse(self, product: Node) -> tuple[str, str] | None:
        """Return (y, x) if a product is y * (1 / x) and the Reciprocal has no other reader; otherwise None."""
        for y, inverse in (product.input, reversed(product.input)):
            maker = self.makers.get(inverse)
            if maker is not None and maker.op_type == "Reciprocal" and self.is_private(inverse):
                return y, maker.input[0]
        return None

    def operand(self, core: Node) -> str:
        """Return the x of the Gelu whose Erf or Tanh is `core`, or "" if the operand of `core` does not fit a Gelu."""
        number, values = self.part(core.input[0])
        if len(values) != 1 or not math.isclose(number, CORES[core.op_type], rel_tol=CLOSE):
            return ""
        if core.op_type == "Erf":
            return values[0]
        node = self.makers.get(values[0])
        if node is None or node.op_type != "Add" or not self.is_private(values[0]):
            return ""
        for x, cube in (node.input, reversed(node.input)):
            number, values = self.part(cube)
            if values == [x] * 3 and math.isclose(number, 0.044715, rel_tol=CLOSE):
                return x
        return ""

    def part(self, name: str) -> Monomial:
        """Return a value as a `Monomial`: a number if it is a constant, else its factors if only one node reads it."""
        number = _number(self.graph, name)
        if number is not None:
            return number, []
        return self.monomial(name) if self.is_private(name) else (1.0, [name])

    def monomial(self, name: str) -> Monomial:
        """Return a value as a `Monomial`, split if it is the result of a Mul, a Div by a number, or a Pow by 2 or 3."""
        node = self.makers.get(name)
        if node is not None and node.op_type == "Mul":
            (a, these), (b, those) = map(self.part, node.input)
            return a * b, these + those
        by = _number(self.graph, node.input[1]) if node is not None and node.op_type in ("Div", "Pow") else None
        if not by or node is None:
            return 1.0, [name]
        number, values = self.part(node.input[0])
        if node.op_type == "Div":
            return number / by, values
        return (number**by, values * int(by)) if by in (2.0, 3.0) else (1.0, [name])

    def reader(self, name: str, *op_types: str) -> Node | None:
        """Return the only reader of a private value if its operator is one of `op_types`; otherwise None."""
        node = self.uses[name][0][0] if self.is_private(name) else None
        return node if node is not None and node.op_type in op_types and not node.domain else None

    def is_private(self, name: str) -> bool:
        """Return True if a value is read exactly once and is not in `kept`."""
        return len(self.uses[name]) == 1 and name not in self.kept

    def alike(self, a: str, b: str) -> bool:
        """Return True if two values are known to have the same rank."""
        shape, other = (shape_of(self.graph.types.get(name)) for name in (a, b))
        return shape is not None and other is not None and len(shape) == len(other)
