"""Reverse-mode differentiation: one walk over the nodes, from the seeds (the loss) back to the wanted values.

The walk visits the active nodes (see `activity`) and calls the rule of each (see `rule_call`). If several nodes read a
value, their cotangents are added. If a value was broadcast, its cotangent is summed to the shape of the value. If a
node is refused, the walk continues, and all refusals are reported at the end.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

import numpy as np

from onnxgrad_cli.autodiff import registry
from onnxgrad_cli.autodiff.activity import Activity, reads_by_position, stopped
from onnxgrad_cli.autodiff.differentiation import Differentiation
from onnxgrad_cli.autodiff.fusions import find_fusions, with_convolutions
from onnxgrad_cli.autodiff.rule_call import Refused, call_rule, shape_mismatch
from onnxgrad_cli.emission import bodies
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Fusion, No, Val
from onnxgrad_cli.errors import ZERO_DIVISOR, Caution, Refusal, Unknown, UnsupportedError
from onnxgrad_cli.ir.domains import full_name, is_standard, short_name
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.node_values import reads
from onnxgrad_cli.ir.types import shape_of

FREEZE = "freeze the weights before it with `freeze`"
ADD_RULE = "add a rule for it with --rules FILE"


def differentiate(
    graph: Graph, seeds: Mapping[str, Val], wanted: Iterable[str], op: Op, training: Differentiation | None = None
) -> dict[str, Val | None]:
    """Emit nodes that compute the cotangents of `wanted`, given the cotangents of some values (`seeds`).

    Args:
        graph: the forward graph. Constants and types may be added to it, and a rule may replace its forward node by
            other nodes that compute the same.
        seeds: map from a value to its cotangent, which has the value's shape and type and is a `Val` of `op`.
        wanted: the values to differentiate with respect to: inputs, weights or intermediate values.
        op: the emitter that gets the nodes (`op.nodes`).
        training: the record that gets the rules used and the cautions.

    Returns:
        A map from each of `wanted` and each value on the path to its cotangent, which has the shape of the value, or to
        None if the cotangent is zero by mathematics.

    Raises:
        UnsupportedError: nodes on the path have no proven derivative. The error lists all of them.
        ValueError: a seed belongs to another emitter.

    Source: A. Griewank and A. Walther, Evaluating Derivatives, SIAM 2008, chapter 3 (reverse mode).
    """
    wanted = list(wanted)
    if any(seed.op is not op for seed in seeds.values()):
        raise ValueError("the seeds belong to another emitter, so the nodes computed from them would be lost")
    graph.vary(wanted)
    op.training = training = training or Differentiation()
    kept = {*wanted, *seeds}
    fusions = find_fusions(graph, kept) | with_convolutions(graph, training.fusions, kept)
    activity = Activity(graph, wanted, seeds)
    op.cautions.extend(_stop_caution(node, position) for node, position in activity.stops)
    walk = _Walk(op, training, activity, fusions)
    for node in activity.path:
        walk.check_rule(node)
    for name, cotangent in seeds.items():
        walk.cotangents[name].append(cotangent)
    for node in activity.path:
        walk.visit(node)
    if walk.refusals:
        what = f"{len(walk.refusals)} of {len(graph.nodes)} nodes can't be differentiated:"
        raise UnsupportedError(what, walk.refusals)
    training.cautions.extend(op.cautions)
    training.partial.extend(walk.partial(wanted))
    return {name: walk.cotangent(name) for name in dict.fromkeys([*wanted, *walk.cotangents])}


class _Walk:
    """One walk over the nodes of a graph, from its seeds back.

    Attributes:
        refusals: the reasons why nodes on the path can't be differentiated.
        cotangents: map from a value to the list of its cotangents, one per reader, in the shape of the value.
            `cotangent` adds them up.
    """

    def __init__(self, op: Op, training: Differentiation, activity: Activity, fusions: Mapping[str, Fusion]) -> None:
        self.op = op
        self.training = training
        self.activity = activity
        self.fusions = fusions
        self.refusals: list[Refusal] = []
        self.cotangents: dict[str, list[Val]] = defaultdict(list)
        self._stopped_inside: set[str] = set()  # values read by nodes with bodies in which gradients stop

    def check_rule(self, node: Node) -> None:
        """Refuse a node whose operator has no rule or is refused by name."""
        rule = self.activity.rule(node)
        if rule is None:
            self.refuse(node, *_why_unknown(node, self.op.graph))
        elif rule.refusal:
            self.refuse(node, rule.refusal, rule.hint)

    def refuse(self, node: Node, reason: str, hint: str = "") -> None:
        """Record the reason why a node can't be differentiated, unless it is recorded already."""
        refusal = Refusal(node.name or node.output[0], short_name(node.op_type, node.domain), reason, hint)
        if refusal not in self.refusals:
            self.refusals.append(refusal)

    def cotangent(self, name: str) -> Val | None:
        """Return the sum of all cotangents of a value, or None if it has none."""
        parts = self.cotangents.get(name)
        if not parts:
            return None
        while len(parts) > 1:
            parts[:2] = [bodies.add(self.op, *parts[:2])]
        return parts[0]

    def visit(self, node: Node) -> None:
        """Compute the cotangents of a node's operands by its rule, or refuse the node if that fails."""
        op, rule = self.op, self.activity.rule(node)
        outputs = node.output
        label = node.name or outputs[0]
        op.scope, op.forward = f"grad/{label}", label
        gs = tuple([self.cotangent(name) if name else None for name in outputs])
        if rule is None or rule.refusal or not any(gs):
            return
        if (fusion := self.fusions.get(outputs[0])) and self.visit_fusion(fusion, gs[0]):
            return
        stopped_before = len(self.training.partial)
        try:
            if self.reads_quantized(node, rule):
                return
            for x, cotangent in call_rule(op, node, rule, gs, self.activity.active):
                self.accumulate_cotangent(node, x, cotangent)
        except Refused as refused:
            self.refuse(node, str(refused))
        except Unknown as unknown_fact:
            reason = f"{unknown_fact}{_other_ranks(op.graph, node)}"
            self.refuse(node, reason, unknown_fact.hint or op.graph.rank_hint())
        except ZeroDivisionError:
            self.refuse(node, f"its gradient rule divides by {ZERO_DIVISOR}", "correct its attributes and export again")
        except UnsupportedError as inner:
            self.refusals.extend(inner.refusals)
        else:
            self.record(node, rule, stopped_before)

    def reads_quantized(self, node: Node, rule: registry.Rule) -> bool:
        """Return True if all quantized inputs of the node come from refused nodes: its rule need not be called then.

        Return False if it has no quantized inputs, or if its rule covers them.

        Raises:
            Refused: another input is quantized, and the rule does not cover integers.
        """
        quantized = self.activity.quantized
        if not quantized or rule.integers:
            return False
        read = [name for name in reads(node) if name in quantized]
        if not all(quantized[name] for name in read):
            raise Refused(f"it computes with '{read[0]}', which is quantized and not dequantized again")
        return bool(read)

    def accumulate_cotangent(self, node: Node, x: Val, cotangent: Val | No) -> None:
        """Add a rule's result to the cotangents of an operand. If it is a `No` or does not fit, refuse the node."""
        if isinstance(cotangent, No):
            self.refuse(node, cotangent.reason, cotangent.hint)
        elif reason := shape_mismatch(cotangent, x):
            self.refuse(node, reason, "correct the rule: it must return one cotangent for each input, in order")
        else:
            fits = self.op.same_shape(cotangent, x) or not x.is_tensor
            self.cotangents[x.name].append(cotangent if fits else self.op.sum_to(cotangent, x))

    def record(self, node: Node, rule: registry.Rule, stopped_before: int) -> None:
        """Record the use of the node's rule, the rule's kink, and gradients that stop inside the node's bodies.

        Args:
            node: the node.
            rule: its rule.
            stopped_before: the length of `training.partial` before the rule was called. Values added since then are
                names inside the node's bodies.
        """
        training = self.training
        if len(training.partial) > stopped_before:
            del training.partial[stopped_before:]
            self._stopped_inside |= self.activity.active.intersection(reads_by_position(node))
        training.rules[full_name(node.op_type, node.domain), rule.source] += 1
        if rule.kink:
            training.kinks[node.op_type] = rule.kink

    def visit_fusion(self, fusion: Fusion, g: Val | None) -> bool:
        """Compute the cotangents of a fusion's inputs from the cotangent `g` of its result.

        The nodes inside the fusion then get no cotangents.

        Returns:
            False if the fusion can't be used, because a value that its rule reads has been removed from the graph.
        """
        op, names = self.op, (*fusion.inputs, *fusion.saved)
        if any(name not in op.graph.types for name in names):
            return False
        active = self.activity.active
        op.wanted = active.intersection(fusion.inputs).__contains__
        xs = [op.val(name) for name in names]
        for x, cotangent in zip(xs, fusion.function(op, g, *xs), strict=False):
            if cotangent is not None and x.name in active:
                self.cotangents[x.name].append(cotangent)
        if fusion.kink:
            self.training.kinks[fusion.operator.rpartition("::")[2]] = fusion.kink
        source = f"{fusion.function.__module__}.{fusion.function.__qualname__}"
        self.training.rules[fusion.operator, source] += 1
        return True

    def partial(self, wanted: Iterable[str]) -> list[str]:
        """Return the values in `wanted` with a partial gradient: gradients stop on a path from the value to a seed."""
        stopped = self._stopped_inside.union(self.activity.stopped)
        behind = self.activity.dependencies(stopped) if stopped else ()
        return [name for name in wanted if name in behind]


def _stop_caution(node: Node, position: int) -> Caution:
    """Return the caution about an active operand at which gradients stop."""
    label, operator = node.name or node.output[0], short_name(node.op_type, node.domain)
    operand = f"operand {position}, '{node.input[position]}'"
    text = f"stop_gradient stops the gradient of '{label}' ({operator}) with respect to its {operand}"
    return Caution("note", label, text)


def _other_ranks(graph: Graph, node: Node) -> str:
    """Return the description of an input or output of a node whose rank depends on sizes, or "" if there is none."""
    names = (name for name in (*node.input, *node.output) if name in graph.ranks)
    return next((f"; '{name}' has {graph.ranks[name]}" for name in names), "")


def _why_unknown(node: Node, graph: Graph) -> tuple[str, str]:
    if node.name in graph.unexpanded:
        return graph.unexpanded[node.name], FREEZE
    if stopped(node):
        return "gradients are stopped at some of its operands, so it needs its own gradient rule", ADD_RULE
    if is_standard(node.domain):
        return f"there is no proven gradient rule for {node.op_type}", FREEZE
    return f"there is no gradient rule for {short_name(node.op_type, node.domain)}", f"{ADD_RULE}, or {FREEZE}"


def or_zero(op: Op, name: str, cotangent: Val | None, training: Differentiation, after: Val | None = None) -> Val:
    """Return the cotangent of a value, or zeros in the value's shape if it has no cotangent.

    Args:
        op: the emitter.
        name: the value.
        cotangent: its cotangent, or None.
        training: the record. It gets a caution if the gradient is zero, or if `stop_gradient` makes it incomplete.
        after: a value from which the zeros are computed, so that no runtime creates them before this value exists.
    """
    if cotangent is not None:
        if name in training.partial:
            text = f"the gradient of '{name}' does not include the paths on which gradients are stopped"
            training.cautions.append(Caution("note", name, text))
        return cotangent
    stops = "because gradients are stopped on all its paths to the loss"
    text = f"the gradient of '{name}' is zero {stops if name in training.partial else 'by mathematics'}"
    training.cautions.append(Caution("zero gradient", name, text))
    like = op.val(name)
    if after is None:
        return op.fill(0.0, like)
    nothing = op.sum(op.Where(op.const(np.array(False)), after, op.const(0.0, after)), keepdims=False)
    return op.expand_like(op.cast(nothing, like), like)


def as_declared(op: Op, name: str, derivative: Val) -> Val:
    """Reshape a derivative to the shape of its value, so that a run fails if the derivative has a different size.

    Rules do not sum over an axis on which two operands have the same symbol. But PyTorch's exporter may give two axes
    the same symbol although their sizes are 5 and 1, and the model then broadcasts them. Without the Reshape, the
    gradient of the smaller input would silently have the shape of the larger one. A derivative is returned unchanged if
    its value has no symbol that occurs twice among the inputs.
    """
    graph = op.graph.proto.graph
    declared = next((value.type for value in (*graph.input, *graph.output) if value.name == name), None)
    symbols = {dim for dim in shape_of(declared) or () if isinstance(dim, str)}
    if not symbols:
        return derivative
    used = Counter(dim for value in graph.input for dim in shape_of(value.type) or ())
    if max(map(used.__getitem__, symbols)) < 2:
        return derivative
    like = op.val(name)
    return op.Reshape(derivative, op.Shape(like), shape=like.known_shape)
