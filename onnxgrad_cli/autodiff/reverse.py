"""Reverse-mode differentiation: one walk over the nodes, from the loss back to whatever is wanted.

The walk decides what matters (values that depend on something wanted and on which the loss depends), calls the
rule of each node that does, sums cotangents where a value was read several times and un-broadcasts them. It
collects every refusal before it gives up, so that a user sees all of them at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto

from onnxgrad_cli.autodiff import registry
from onnxgrad_cli.autodiff.differentiation import Differentiation
from onnxgrad_cli.autodiff.fusions import find_fusions
from onnxgrad_cli.emission import bodies
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.fusion import Fusion
from onnxgrad_cli.emission.values import No, Val
from onnxgrad_cli.errors import Caution, Refusal, Unknown, UnsupportedError
from onnxgrad_cli.ir.domains import full_name, is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.nodes import FORWARD, ROLE, captured, reads
from onnxgrad_cli.ir.types import is_differentiable, is_float


def differentiate(
    graph: Graph, seeds: Mapping[str, Val], wanted: Iterable[str], op: Op, training: Differentiation | None = None
) -> dict[str, Val | None]:
    """Emit into `op` the cotangents of `wanted`, given those of some values as `seeds`.

    Args:
        graph: the forward graph; not changed but for its pool of constants, its types, and a node whose rule has it
            written in another form, which computes the same.
        seeds: value -> its cotangent, of the value's shape and type, as a value of `op`.
        wanted: values to differentiate with respect to: inputs, weights or intermediates.
        op: where the nodes are written (`op.nodes`).
        training: where the rules used and the cautions are recorded.

    Returns:
        value -> cotangent in the value's own shape, for all of `wanted` and every value on the way; None where
        it is zero by mathematics.

    Raises:
        UnsupportedError: nodes on the way have no proven derivative; all of them are listed.
        ValueError: a seed belongs to another emitter.

    Source: A. Griewank and A. Walther, Evaluating Derivatives, SIAM 2008, chapter 3 (reverse mode).
    """
    wanted = list(wanted)
    if any(seed.op is not op for seed in seeds.values()):
        raise ValueError("the seeds belong to another emitter: what is computed from them would be lost")
    graph.vary(wanted)
    op.training = training = training or Differentiation()
    walk = _Walk(graph, op, training)
    walk.adjoints = find_fusions(graph, {*wanted, *seeds}) | training.fusions
    path = walk.path(wanted, seeds)
    for name, cotangent in seeds.items():
        walk.add(name, cotangent)
    for node in path:
        walk.visit(node)
    if walk.refusals:
        raise UnsupportedError(
            f"{len(walk.refusals)} of {len(graph.nodes)} nodes can't be differentiated:", walk.refusals
        )
    training.cautions.extend(op.cautions)
    training.partial.extend(walk.partial(wanted))
    return {name: walk.cotangent(name) for name in dict.fromkeys([*wanted, *walk.pending])}


def on_the_way(graph: Graph, wanted: Iterable[str], seeds: Iterable[str]) -> tuple[set[str], set[str]]:
    """The values that depend on something wanted, and those of which a seed depends, along float paths."""
    walk, seeds = _Walk(graph, Op(graph), Differentiation()), list(seeds)
    path = walk.path(wanted, seeds)
    return walk.active, {*seeds, *(name for node in path for name in reads(node))}


def open_reads(node: NodeProto) -> list[str]:
    """What a node reads where a cotangent may go: all but the operands that `registry.stop_gradient` declares."""
    return [name for name in _targets(node) if name]


def _targets(node: NodeProto) -> list[str]:
    """What a node reads, by position, "" where an operand is absent or stopped."""
    inputs = node.input[:]
    for position in stopped(node):
        inputs[position] = ""
    return inputs + captured(node) if node.attribute else inputs


def stopped(node: NodeProto) -> list[int]:
    """The operands of a node at which gradients stop: none where a loss, a definition or a rule has written it."""
    declared = registry.stopped(node.op_type, node.domain)
    if not declared or any(entry.key in (ROLE, FORWARD) for entry in node.metadata_props):
        return []
    return [position for position in sorted(declared) if position < len(node.input)]


class _Walk:
    def __init__(self, graph: Graph, op: Op, training: Differentiation) -> None:
        self.graph = graph
        self.op = op
        self.training = training
        self.active: set[str] = set()
        self.quantized: dict[str, bool] = {}  # active integers -> whether a node on their way is refused by name
        self.dependent: list[NodeProto] = []
        self.stopped: set[str] = set()  # what is active and read where gradients stop
        self.refusals: list[Refusal] = []
        self.pending: dict[str, list[Val]] = defaultdict(list)
        self.adjoints: Mapping[str, Fusion] = {}
        self._rules: dict[tuple[str, str], registry.Rule | None] = {}

    def rule(self, node: NodeProto) -> registry.Rule | None:
        key = (node.op_type, node.domain)
        if key not in self._rules:
            self._rules[key] = registry.lookup(*key, self.graph.opset(node.domain) or 1)
        return self._rules[key]

    def path(self, wanted: Iterable[str], seeds: Iterable[str]) -> list[NodeProto]:
        """The nodes to visit, last first: they depend on something wanted, and a seed depends on them."""
        self.active.update(wanted)
        dependent, stops = self.dependent, []
        types = self.graph.types
        for node in self.graph.nodes:
            names = reads(node)
            if self.active.isdisjoint(names):
                continue
            rule = self.rule(node)
            if rule is not None and rule.is_zero:
                continue
            if stop := stopped(node):
                stops += [(node, p) for p in stop if node.input[p] in self.active]
                if self.active.isdisjoint(open_reads(node)):
                    continue
            dependent.append(node)
            floats = [n for n in node.output[:] if n and (n not in types or is_differentiable(types[n]))]
            self.active.update(floats)
            carried = [self.quantized[name] for name in names if name in self.quantized] if self.quantized else ()
            if carried or (rule is not None and rule.integers):
                named = any(carried) or bool(rule and rule.refusal)
                self.quantized.update((n, named) for n in node.output if n and n not in floats)
                self.active |= self.quantized.keys()
        self.stop(stops, seeds)
        needed = set(seeds)
        path = []
        for node in reversed(dependent):
            if any(name in needed and name in self.active for name in node.output[:]):
                path.append(node)
                needed.update(reads(node))
                rule = self.rule(node)
                if rule is None:
                    self.refuse(node, *_why_unknown(node, self.graph))
                elif rule.refusal:
                    self.refuse(node, rule.refusal, rule.hint)
        return path

    def stop(self, stops: Sequence[tuple[NodeProto, int]], seeds: Iterable[str]) -> None:
        """Say of the active operands at which gradients stop so, as far as a seed depends on them."""
        if not stops:
            return
        upstream = set(seeds)
        for node in reversed(self.graph.nodes):
            if upstream.intersection(node.output):
                upstream.update(reads(node))
        for node, position in stops:
            if upstream.intersection(node.output):
                name, label = node.input[position], node.name or node.output[0]
                self.stopped.add(name)
                text = (
                    f"no gradient goes from '{label}' ({_full_name(node)}) to its operand {position}, '{name}': "
                    "stop_gradient declares so"
                )
                self.op.cautions.append(Caution("note", label, text))

    def partial(self, wanted: Iterable[str]) -> list[str]:
        """Those of `wanted` of whose paths to a seed some are stopped."""
        names = set(self.stopped)
        for node in reversed(self.dependent if names else []):
            if names.intersection(node.output):
                names.update(open_reads(node))
        return [name for name in wanted if name in names]

    def refuse(self, node: NodeProto, reason: str, hint: str = "") -> None:
        refusal = Refusal(node.name or node.output[0], _full_name(node), reason, hint)
        if refusal not in self.refusals:
            self.refusals.append(refusal)

    def add(self, name: str, cotangent: Val) -> None:
        self.pending[name].append(cotangent)

    def cotangent(self, name: str) -> Val | None:
        """The sum of what reached `name` so far."""
        parts = self.pending.get(name)
        if not parts:
            return None
        while len(parts) > 1:
            parts[:2] = [bodies.add(self.op, *parts[:2])]
        return parts[0]

    def visit(self, node: NodeProto) -> None:
        op, rule = self.op, self.rule(node)
        outputs, given = node.output[:], node.input[:]
        label = node.name or outputs[0]
        op.scope, op.forward = f"grad/{label}", label
        gs = tuple([self.cotangent(name) if name else None for name in outputs])
        if rule is None or rule.refusal or not any(gs):
            return
        if (adjoint := self.adjoints.get(outputs[0])) and self.visit_all(adjoint, gs[0]):
            return
        if self.quantized and not rule.integers and (carried := [n for n in reads(node) if n in self.quantized]):
            if not all(self.quantized[name] for name in carried):
                self.refuse(node, f"it computes with '{carried[0]}', which is quantized and not yet dequantized")
            return
        asked, op.node = rule.signature, node
        names = _targets(node)
        op.wanted = self.active.intersection(names).__contains__
        inside = captured(node) if node.attribute else []
        xs: list[Val | None] = [op.val(name) if name else None for name in (*given, *inside)]
        if not asked.variadic:
            if any(name in self.active for name in names[asked.inputs : len(given)]):
                return self.refuse(node, f"the rule knows {asked.inputs} inputs, the node has {len(xs)}")
            xs = (xs + [None] * asked.inputs)[: asked.inputs]
        attributes, unknown = node_attributes(op, node, asked)
        if unknown:
            return self.refuse(node, f"attribute {unknown} is not covered by the rule")
        if not asked.all_cotangents and (gs[0] is None or any(gs[1:])):
            used = [name for name, g in zip(outputs, gs, strict=True) if g is not None]
            return self.refuse(node, f"the gradient through its output {', '.join(used)} is not covered by the rule")
        ys = tuple([op.val(name) if name else None for name in outputs])
        before = len(self.training.partial)
        try:
            result = rule.function(  # type: ignore[misc]
                op,
                gs if asked.all_cotangents else gs[0],
                ys if asked.all_outputs else ys[0],
                *xs,
                **attributes,
            )
            cotangents = result if isinstance(result, (tuple, list)) else (result,)
            if any(name in self.active for name in names[len(cotangents) :]):
                return self.refuse(node, f"the rule returns {len(cotangents)} cotangents for {len(xs)} inputs")
            for name, x, cotangent in zip(names, xs, cotangents, strict=False):
                if cotangent is None or name not in self.active:
                    continue
                if isinstance(cotangent, No):
                    self.refuse(node, cotangent.reason, cotangent.hint)
                elif x is not None and (reason := _misfit(cotangent, x)):
                    self.refuse(node, reason, "the rule is wrong: it returns one cotangent for each input, in order")
                elif x is not None:
                    self.add(name, op.sum_to(cotangent, x) if x.is_tensor else cotangent)
        except Unknown as unknown_fact:
            return self.refuse(node, str(unknown_fact), "fix the model's shapes with `dims` or `shapes`")
        except UnsupportedError as inner:
            return self.refusals.extend(inner.refusals)
        if len(self.training.partial) > before:  # gradients stop in one of its bodies
            del self.training.partial[before:]
            self.stopped.update(name for name in names if name in self.active)
        self.training.rules[full_name(node.op_type, node.domain), rule.source] += 1
        if rule.kink:
            self.training.kinks[node.op_type] = rule.kink

    def visit_all(self, adjoint: Fusion, g: Val | None) -> bool:
        """Hand on the cotangent of what several nodes make, of which none is visited then; False if some are gone."""
        op, names = self.op, (*adjoint.inputs, *adjoint.saved)
        if any(name not in self.graph.types for name in names):
            return False
        op.wanted = self.active.intersection(adjoint.inputs).__contains__
        xs = [op.val(name) for name in names]
        for x, cotangent in zip(xs, adjoint.function(op, g, *xs), strict=False):
            if cotangent is not None and x.name in self.active:
                self.add(x.name, cotangent)
        source = f"{adjoint.function.__module__}.{adjoint.function.__qualname__}"
        self.training.rules[adjoint.operator, source] += 1
        return True


def node_attributes(op: Op, node: NodeProto, asked: registry.Signature) -> tuple[dict[str, Any], str | None]:
    """The attributes a rule asks for, defaults filled in, and the first one it does not cover (or None).

    An attribute the rule does not name must stand at its default: nothing is ignored by accident.
    """
    if not (node.attribute or asked.attributes or asked.any_attribute):
        return {}, None
    defaults = {**asked.attributes, **op.attributes(node.op_type, node.domain)}
    values = dict(defaults)
    for attribute in node.attribute:
        name, value = attribute.name, onnx.helper.get_attribute_value(attribute)
        values[name] = value.decode() if isinstance(value, bytes) else value
        covered = asked.any_attribute or name in asked.attributes
        if not covered and defaults.get(name) != values[name]:
            return {}, f"{name}={values[name]!r}"
    if asked.any_attribute:
        return values, None
    return {name: values.get(name) for name in asked.attributes}, None


def _misfit(cotangent: Val, x: Val) -> str:
    """Why a cotangent can't be that of `x`, or "": it has its type, and its shape or one that it broadcasts to."""
    if cotangent.type is x.type and x.type is not None:
        return ""
    have, want = cotangent.known_shape, x.known_shape
    if is_float(x.type) and cotangent.dtype != x.dtype:
        types = [onnx.helper.tensor_dtype_to_string(v.dtype).removeprefix("TensorProto.") for v in (cotangent, x)]
        return f"its rule gives '{x.name}', of type {types[1]}, a cotangent of type {types[0]}"
    if not x.is_tensor or have is None or want is None:
        return ""
    sizes = zip(have[::-1], want[::-1], strict=False)
    clash = any(isinstance(h, int) and isinstance(w, int) and w not in (1, h) for h, w in sizes)
    if clash or len(have) < len(want):
        return f"its rule gives '{x.name}', of shape {list(want)}, a cotangent of shape {list(have)}"
    return ""


def _full_name(node: NodeProto) -> str:
    return f"{node.domain}::{node.op_type}" if node.domain else node.op_type


def _why_unknown(node: NodeProto, graph: Graph) -> tuple[str, str]:
    if node.name in graph.kept:
        return graph.kept[node.name], "freeze the weights before it with `freeze`"
    if stopped(node):
        return (
            "gradients stop at some of its operands, for which it needs a rule of its own",
            "give it one with --rules",
        )
    if not is_standard(node.domain):
        return (
            f"there is no rule for {_full_name(node)}",
            "give it a rule with --rules FILE, or freeze the weights before it with `freeze`",
        )
    return f"there is no proven rule for {node.op_type}", "freeze the weights before it with `freeze`"


def or_zero(op: Op, name: str, cotangent: Val | None, training: Differentiation, after: Val | None = None) -> Val:
    """The cotangent of a value, or zeros of its shape where it has none; that is noted, and so are stopped paths.

    The zeros are made from `after`, where it is given, so that no runtime makes them before it.
    """
    if cotangent is not None:
        if name in training.partial:
            text = f"the gradient of '{name}' leaves out the paths that are stopped"
            training.cautions.append(Caution("note", name, text))
        return cotangent
    why = ": all its paths to the loss are stopped" if name in training.partial else " by mathematics"
    text = f"the gradient of '{name}' is zero{why}"
    training.cautions.append(Caution("zero gradient", name, text))
    like = op.val(name)
    if after is None:
        return op.fill(0.0, like)
    nothing = op.sum(op.Where(op.const(np.array(False)), after, op.const(0.0, after)), keepdims=False)
    return op.expand_like(op.cast(nothing, like), like)
