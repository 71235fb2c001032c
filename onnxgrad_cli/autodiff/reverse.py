"""Reverse-mode differentiation: one walk over the nodes, from the loss back to whatever is wanted.

The walk visits the nodes that matter (`activity` finds them), calls the rule of each (`rule_call`), sums cotangents
where a value was read several times and un-broadcasts them. It collects every refusal before it gives up, so that a
user sees all of them at once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

import numpy as np

from onnxgrad_cli.autodiff import registry
from onnxgrad_cli.autodiff.activity import Activity, reads_by_position, stopped
from onnxgrad_cli.autodiff.differentiation import Differentiation
from onnxgrad_cli.autodiff.fusions import find_fusions, with_convolutions
from onnxgrad_cli.autodiff.operand_sizes import contradiction, misdivision
from onnxgrad_cli.autodiff.rule_call import Refused, call_rule, misfit
from onnxgrad_cli.emission import bodies
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.fusion import Fusion
from onnxgrad_cli.emission.values import No, Val
from onnxgrad_cli.errors import NAUGHT, Caution, InternalError, Refusal, Unknown, UnsupportedError
from onnxgrad_cli.ir.domains import full_name, is_standard, short_name
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.nodes import reads
from onnxgrad_cli.ir.types import shape_of


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
    kept = {*wanted, *seeds}
    fusions = find_fusions(graph, kept) | with_convolutions(graph, training.fusions, kept)
    activity = Activity(graph, wanted, seeds)
    op.cautions.extend(_stop_caution(node, position) for node, position in activity.stops)
    walk = _Walk(op, training, activity, fusions)
    for node in activity.path:
        walk.check_rule(node)
    for name, cotangent in seeds.items():
        walk.add(name, cotangent)
    for node in activity.path:
        walk.visit(node)
    if walk.refusals:
        raise UnsupportedError(
            f"{len(walk.refusals)} of {len(graph.nodes)} nodes can't be differentiated:", walk.refusals
        )
    training.cautions.extend(op.cautions)
    training.partial.extend(walk.partial(wanted))
    return {name: walk.cotangent(name) for name in dict.fromkeys([*wanted, *walk.cotangents])}


class _Walk:
    """One walk over the nodes of a graph, from its seeds back.

    Attributes:
        refusals: why nodes on the way can't be differentiated.
        cotangents: value -> the cotangents that have reached it, which are summed up when somebody asks.
    """

    def __init__(self, op: Op, training: Differentiation, activity: Activity, fusions: Mapping[str, Fusion]) -> None:
        self.op = op
        self.training = training
        self.activity = activity
        self.fusions = fusions
        self.refusals: list[Refusal] = []
        self.cotangents: dict[str, list[Val]] = defaultdict(list)
        self._stopped_inside: set[str] = set()  # read by a node in whose bodies gradients stop

    def check_rule(self, node: Node) -> None:
        """Refuse a node that has no rule, or one that refuses it by name."""
        rule = self.activity.rule(node)
        if rule is None:
            self.refuse(node, *_why_unknown(node, self.op.graph))
        elif rule.refusal:
            self.refuse(node, rule.refusal, rule.hint)

    def refuse(self, node: Node, reason: str, hint: str = "") -> None:
        """Note why a node can't be differentiated, once."""
        refusal = Refusal(node.name or node.output[0], short_name(node.op_type, node.domain), reason, hint)
        if refusal not in self.refusals:
            self.refusals.append(refusal)

    def add(self, name: str, cotangent: Val) -> None:
        """Note a cotangent of a value, in the value's own shape."""
        self.cotangents[name].append(cotangent)

    def cotangent(self, name: str) -> Val | None:
        """The sum of the cotangents that have reached a value; None where none has."""
        parts = self.cotangents.get(name)
        if not parts:
            return None
        while len(parts) > 1:
            parts[:2] = [bodies.add(self.op, *parts[:2])]
        return parts[0]

    def visit(self, node: Node) -> None:
        """Hand the cotangents of a node's outputs on to its operands, by its rule; refuse the node where that fails."""
        op, rule = self.op, self.activity.rule(node)
        outputs = node.output
        label = node.name or outputs[0]
        op.scope, op.forward = f"grad/{label}", label
        gs = tuple([self.cotangent(name) if name else None for name in outputs])
        if rule is None or rule.refusal or not any(gs):
            return
        if reason := misdivision(op.graph, node):
            self.refuse(node, reason, "export the model again")
            return
        if (fusion := self.fusions.get(outputs[0])) and self.visit_fusion(fusion, gs[0]):
            return
        stopped_before = len(self.training.partial)
        try:
            if self.reads_quantized(node, rule):
                return
            for x, cotangent in call_rule(op, node, rule, gs, self.activity.active):
                self.hand_on(node, x, cotangent)
        except Refused as refused:
            self.refuse(node, refused.reason, refused.hint)
        except Unknown as unknown_fact:
            reason = f"{unknown_fact}{_other_ranks(op.graph, node)}"
            self.refuse(node, reason, unknown_fact.hint or op.graph.rank_hint())
        except ZeroDivisionError:
            self.refuse(node, f"its rule divides by {NAUGHT}", "export the model again")
        except UnsupportedError as inner:
            self.refusals.extend(inner.refusals)
        except InternalError:
            reason = contradiction(op.graph, node)
            if not reason:
                raise
            self.refuse(node, reason, "export the model again")
        else:
            self.record(node, rule, stopped_before)

    def reads_quantized(self, node: Node, rule: registry.Rule) -> bool:
        """Whether a node computes with integers that stand for floats, which is refused unless its rule knows them."""
        quantized = self.activity.quantized
        if not quantized or rule.integers:
            return False
        read = [name for name in reads(node) if name in quantized]
        if not all(quantized[name] for name in read):
            raise Refused(f"it computes with '{read[0]}', which is quantized and not yet dequantized")
        return bool(read)

    def hand_on(self, node: Node, x: Val, cotangent: Val | No) -> None:
        """Add what a rule returns for an operand to the operand's cotangents, unless it is refused or does not fit."""
        if isinstance(cotangent, No):
            self.refuse(node, cotangent.reason, cotangent.hint)
        elif reason := misfit(cotangent, x):
            self.refuse(node, reason, "the rule is wrong: it returns one cotangent for each input, in order")
        else:
            fits = self.op.same_shape(cotangent, x) or not x.is_tensor
            self.add(x.name, cotangent if fits else self.op.sum_to(cotangent, x))

    def record(self, node: Node, rule: registry.Rule, stopped_before: int) -> None:
        """Note that a rule was used, its kink, and whether gradients stop in one of the node's bodies."""
        training = self.training
        if len(training.partial) > stopped_before:
            del training.partial[stopped_before:]
            self._stopped_inside |= self.activity.active.intersection(reads_by_position(node))
        training.rules[full_name(node.op_type, node.domain), rule.source] += 1
        if rule.kink:
            training.kinks[node.op_type] = rule.kink

    def visit_fusion(self, fusion: Fusion, g: Val | None) -> bool:
        """Hand the cotangent of a fusion's result on to its inputs, so that its nodes get none; False if a value that
        its rule reads is gone."""
        op, names = self.op, (*fusion.inputs, *fusion.saved)
        if any(name not in op.graph.types for name in names):
            return False
        active = self.activity.active
        op.wanted = active.intersection(fusion.inputs).__contains__
        xs = [op.val(name) for name in names]
        for x, cotangent in zip(xs, fusion.function(op, g, *xs), strict=False):
            if cotangent is not None and x.name in active:
                self.add(x.name, cotangent)
        if fusion.kink:
            self.training.kinks[fusion.operator.rpartition("::")[2]] = fusion.kink
        source = f"{fusion.function.__module__}.{fusion.function.__qualname__}"
        self.training.rules[fusion.operator, source] += 1
        return True

    def partial(self, wanted: Iterable[str]) -> list[str]:
        """Those of `wanted` of whose paths to a seed some are stopped."""
        stopped = self._stopped_inside.union(self.activity.stopped)
        behind = self.activity.dependencies(stopped) if stopped else ()
        return [name for name in wanted if name in behind]


def _stop_caution(node: Node, position: int) -> Caution:
    """What a reader should know of an active operand at which gradients stop."""
    label = node.name or node.output[0]
    text = (
        f"no gradient goes from '{label}' ({short_name(node.op_type, node.domain)}) to its operand {position}, "
        f"'{node.input[position]}': stop_gradient declares so"
    )
    return Caution("note", label, text)


def _other_ranks(graph: Graph, node: Node) -> str:
    """What is known of a value that a node reads or makes and that has one rank here and another there."""
    names = (name for name in (*node.input, *node.output) if name in graph.ranks)
    return next((f"; '{name}' has {graph.ranks[name]}" for name in names), "")


def _why_unknown(node: Node, graph: Graph) -> tuple[str, str]:
    if node.name in graph.unexpanded:
        return graph.unexpanded[node.name], "freeze the weights before it with `freeze`"
    if stopped(node):
        return (
            "gradients stop at some of its operands, for which it needs a rule of its own",
            "give it one with --rules",
        )
    if not is_standard(node.domain):
        return (
            f"there is no rule for {short_name(node.op_type, node.domain)}",
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


def as_declared(op: Op, name: str, derivative: Val) -> Val:
    """Return a derivative of the shape of an input or output; it fails to run if two sizes that have one symbol differ.

    Rules sum nothing over an axis whose symbol an operand shares. PyTorch's exporter also gives axes of sizes 5 and 1
    one symbol, and the model broadcasts them: the gradient of the smaller input would have the larger one's shape.
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
