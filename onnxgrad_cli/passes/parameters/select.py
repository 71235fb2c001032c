"""Choose which float tensors of a model are trained, and which are constants by their role.

A file does not say which of its initializers were parameters, so this is inferred from how each one is used. Every
decision is recorded with its reason. `--train`, `--preset` and `--train-last` restrict the choice, and `--freeze`
overrides them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from onnxgrad_cli.autodiff import registry
from onnxgrad_cli.autodiff.activity import carriers, open_reads
from onnxgrad_cli.common.flags import listed
from onnxgrad_cli.errors import Caution, Refusal, UnsupportedError
from onnxgrad_cli.ir.domains import full_name, short_name
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.modules import known_as
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.node_values import reads
from onnxgrad_cli.ir.types import is_float
from onnxgrad_cli.options import SelectionOptions
from onnxgrad_cli.passes.parameters import presets
from onnxgrad_cli.passes.parameters.constants import ConstantRoles, Decision
from onnxgrad_cli.passes.parameters.patterns import matches, matching
from onnxgrad_cli.passes.parameters.sharing import owners_of, twins
from onnxgrad_cli.passes.parameters.untrained import integer_weights, untrained, untrained_floats
from onnxgrad_cli.passes.stored_integers import is_integer, quantized_matrices
from onnxgrad_cli.record import ParameterRecord, SelectionRecord

TIE = "`tie`"
"""The subject of cautions about two weights that may be meant as one."""

UNTIED = "no differentiable path leads from it to the loss"

FROZEN = "frozen by `freeze`"
"""The recorded reason why a weight that `freeze` matches is not trained."""

QUANTIZED = "quantized: integers have no gradient"

ByName = Mapping[str, list[str]]
"""Map from a pattern of `train` to the weights whose own names match it (not the names of modules that read them)."""


def select(graph: Graph, options: SelectionOptions, training: SelectionRecord) -> None:
    """Fill `training.trained`, `.not_trained` and `.grad_of_input`, in the order of the model's initializers.

    If adapters are requested, the weights that would be trained without adapters go to `training.adaptable`, except
    those that are selected by name.

    Raises:
        UsageError: a pattern or a preset matches nothing.
        UnsupportedError: no differentiable path leads from a selected tensor to the loss. Or there is nothing to
            differentiate with respect to, and `training.may_be_none` is False.
    """
    floats = [name for name in graph.initializers if is_float(graph.types[name]) and not graph.added(name)]
    tied = tied_to(graph, training.ends)
    known = known_as(graph.nodes, floats) if options.train or options.freeze else None
    asked = matching(options.train, floats, "`train`", "float weights", known)
    by_name = {pattern: [name for name in asked if matches(name, pattern)] for pattern in options.train}
    training.named = [pattern for pattern, names in by_name.items() if pattern in names]
    frozen = dict.fromkeys(matching(options.freeze, floats, "`freeze`", "float weights", known), FROZEN)
    inputs = [name for name in training.inputs if is_float(graph.types.get(name))]
    training.grad_of_input = matching(options.grad_of_input, inputs, "`grad_of_input`", "float inputs")
    unfit = _unfit(graph, training, floats, tied, by_name)
    fit = [name for name in floats if name not in unfit and name not in frozen]
    chosen = {*asked, *presets.chosen(graph, options, training.predictions, fit)}
    if options.lora:
        training.adaptable = [name for name in fit if name not in chosen]
    reasons = {**unfit, **_not_chosen(options, training.adaptable, set(floats) - chosen), **frozen}
    training.not_trained.update((name, reasons[name]) for name in floats if name in reasons)
    training.trained = [name for name in floats if name not in reasons]
    _refuse_untied(graph, training.ends, tied, by_name, frozen)
    training.cautions.extend(_alike(graph, training.trained))
    read = (node.input[0] for node in graph.nodes if node.op_type == "DequantizeLinear")
    training.not_trained.update(dict.fromkeys(filter(graph.initializers.__contains__, read), QUANTIZED))
    training.not_trained.update(_in_unknown_forms(graph))
    training.cautions.extend(untrained(graph, options, training))
    adapted = training.adaptable or (options.lora and quantized_matrices(graph))
    if not (training.may_be_none or training.trained or training.grad_of_input or adapted):
        raise _nothing(graph, floats, training, options)


def _refuse_untied(graph: Graph, ends: list[str], tied: set[str], by_name: ByName, frozen: Collection[str]) -> None:
    """Refuse weights without a path to the loss, if `train` names one exactly or a glob matches only such weights."""
    for pattern, hits in by_name.items():
        untied = [name for name in hits if name not in tied and name not in frozen]
        if untied and (pattern in untied or len(untied) == len(hits)):
            cut = _cuts(graph, tied).get(untied[0])
            where = f": {cut}" if cut else ""
            raise UnsupportedError(f"`train`: no differentiable path leads from '{untied[0]}' to {listed(ends)}{where}")


def _in_unknown_forms(graph: Graph) -> dict[str, str]:
    """Return a map: integer matrix that can't be dequantized -> why its reader's definition doesn't cover it."""
    stored = {name for name, tensor in graph.initializers.items() if is_integer(tensor) and len(tensor.dims) > 1}
    return {
        name: f"'{node.name}' ({node.op_type}) reads it and can't be differentiated: {graph.unexpanded[node.name]}"
        for node in graph.nodes if node.name in graph.unexpanded
        for name in node.input if name in stored
    }  # fmt: skip


def _unfit(
    graph: Graph, training: SelectionRecord, floats: list[str], tied: set[str], by_name: ByName
) -> dict[str, str]:
    """Return a map: one of `floats` that can't be trained, or is a constant that `train` doesn't name -> the reason."""
    reached = tied_to(graph, training.ends, reads) if any(registry.all_stopped()) else tied
    roles = ConstantRoles(graph)
    released = {*training.learned_scales, *_released(roles, by_name, tied)}
    cuts = {} if tied.issuperset(floats) else _cuts(graph, tied)

    def reason(name: str) -> str:
        if name in training.state:
            return f"a running statistic, which the output '{training.state[name]}' updates"
        if name in tied:
            role = Decision("option") if name in released else roles.decide(name)
            if role.reason:
                training.heuristics[name] = role.heuristic
            return role.reason or roles.infinite(name)
        if name in reached:
            return "gradients are stopped at the operator inputs that connect it with the loss"
        return UNTIED + (f": {cuts[name]}" if name in cuts else "")

    reasons = {name: reason(name) for name in floats}
    if all(reasons.values()):  # then tensors that only follow a formula are weights, filled by that formula
        reasons = {name: reason for name, reason in reasons.items() if name not in roles.by_values}
    training.heuristics = {name: each for name, each in training.heuristics.items() if name in reasons}
    doubts = {name: text for name, text in roles.doubts.items() if name not in roles.by_values or name in reasons}
    training.cautions.extend(Caution("note", name, text) for name, text in doubts.items())
    return {name: reason for name, reason in reasons.items() if reason}


def _released(roles: ConstantRoles, by_name: ByName, tied: Collection[str]) -> Iterator[str]:
    """Yield the tensors that `train` selects even if they are constants by their role.

    These are the tensors that `train` names exactly. If a glob matches only constants, it selects all of them.
    """
    for pattern, hits in by_name.items():
        found = [name for name in hits if name in tied]
        if pattern in found:
            yield pattern
        elif all(map(roles.reason, found)):
            yield from found


def _not_chosen(options: SelectionOptions, adaptable: list[str], others: set[str]) -> dict[str, str]:
    """Return a map: weight that is frozen because others are selected, or adapters requested -> the reason."""
    if options.lora:
        return dict.fromkeys(adaptable, "frozen: adapters are trained instead")
    choices = ["`train`"] if options.train else []
    choices += [f"`preset={name!r}`" for name in options.preset]
    choices += [f"`train_last={options.train_last}`"] if options.train_last else []
    return dict.fromkeys(others, f"not named by {' or '.join(choices)}") if choices else {}


def _alike(graph: Graph, trained: list[str]) -> Iterator[Caution]:
    """Yield a note for each trained weight that several modules read, and for each that is the transpose of another."""
    # in a model with derivatives, each weight has two readers: its module and the module's derivative
    for name, owners in {} if graph.derived else owners_of(graph, trained).items():
        if len(owners) > 1:
            text = f"'{name}' is read by {listed(owners)} and trained as one weight. Exporters also merge weights "
            yield Caution("note", name, f"{text}of equal values; `untie` trains them separately")
    for name, of, transposed in twins(graph, trained):
        if transposed:
            text = f"'{name}' is '{of}' transposed: they are trained as two weights. `tie={name!r}` trains them as one"
            yield Caution("note", TIE, text)


def _nothing(graph: Graph, floats: list[str], training: SelectionRecord, options: SelectionOptions) -> UnsupportedError:
    """Return the error for a model without any weight or input to differentiate with respect to."""
    refusals = list(_never_differentiated(graph))
    if not floats:
        return UnsupportedError(
            "the model has no float initializer, so there is nothing to train",
            refusals,
            hint=None if refusals else "request gradients of its float inputs with `grad_of_input='*'`",
        )
    reasons = [f"{name}: {reason}" for name, reason in list(training.not_trained.items())[:20]]
    hint = "choose weights with `train=GLOB`"
    if FROZEN in training.not_trained.values():
        hint = "freeze fewer weights, or leave out `freeze`"
    if integer_weights(graph).dequantized and not options.straight_through:
        hint = "pass `quantization='ste'` to train the weights stored as integers with the straight-through estimator"
    return UnsupportedError("no weight is left to train:", refusals, hint, reasons)


def _never_differentiated(graph: Graph) -> Iterator[Refusal]:
    """Yield refusals for nodes that can't be differentiated: refused by a rule, or not covered by their definition.

    A node that its definition doesn't cover may hold weights in its attributes, which only the definition would turn
    into tensors.
    """
    for node in graph.nodes:
        rule = registry.lookup(node.op_type, node.domain, graph.opset(node.domain) or 1)
        operator = full_name(node.op_type, node.domain)
        if rule is not None and rule.refusal:
            yield Refusal(node.name, operator, rule.refusal, rule.hint)
        elif node.name in graph.unexpanded:
            yield Refusal(node.name, operator, graph.unexpanded[node.name])


def drop_untied(graph: Graph, training: ParameterRecord, losses: list[str]) -> None:
    """Remove weights from `training.trained` if neither a loss nor an output that a loss reads depends on them.

    If a loss is a Python function, weights are chosen before the losses are known. Then each weight was chosen on which
    any output of the model depends.

    Args:
        graph: the model with its losses.
        training: the record, which is changed.
        losses: the values of the losses.

    Raises:
        UnsupportedError: `train` names such a weight exactly.
    """
    tied = tied_to(graph, [*losses, *training.predictions])
    untied = [name for name in training.trained if name not in tied]
    if named := [name for name in untied if name in training.named]:
        raise UnsupportedError(f"`train`: no differentiable path leads from '{named[0]}' to the loss")
    training.trained = [name for name in training.trained if name in tied]
    training.adapters = [each for each in training.adapters if tied.issuperset(each.names)]
    training.not_trained.update(dict.fromkeys(untied, UNTIED))
    training.cautions.extend(untrained_floats(graph, training, untied))


def refuse_constant_loss(graph: Graph, training: ParameterRecord, losses: list[str]) -> None:
    """Refuse losses that depend on none of the trained weights.

    Raises:
        UnsupportedError: weights must be trained, no gradient of an input is requested, and no differentiable path
            leads from a trained weight to one of `losses`.
    """
    optional = not training.trained or training.may_be_none or training.grad_of_input
    if not optional and tied_to(graph, losses).isdisjoint(training.trained):
        raise UnsupportedError(
            "no differentiable path leads from a trained weight to the loss, so there is nothing to train",
            hint="compute the loss from outputs of the model, with differentiable operators",
        )


def tied_to(graph: Graph, outputs: list[str], read: Callable[[Node], Sequence[str]] = open_reads) -> set[str]:
    """Return every value from which a path leads to `outputs`, through differentiable or refused operators.

    A path ends where floats become integers, unless they are quantized floats. `read` returns the operands of a node
    through which paths may lead.
    """
    tied, may_be_float = set(outputs), carriers(graph)
    opsets = {entry.domain or "": entry.version for entry in graph.proto.opset_import}
    lookup = functools.cache(lambda op_type, domain: registry.lookup(op_type, domain, opsets.get(domain or "", 1)))
    for node in reversed(graph.nodes):
        made = node.output[:]
        if not tied.isdisjoint(made):
            rule = lookup(node.op_type, node.domain)
            if rule is not None and rule.is_zero:
                continue
            through = rule is None or rule.integers or any([n in tied and may_be_float(n) for n in made])
            names = read(node)
            tied.update(names if through else [n for n in names if not may_be_float(n)])
    return tied


def _cuts(graph: Graph, tied: set[str]) -> dict[str, str]:
    """Return a map: value that reaches the loss only by non-differentiable paths -> a description of the cut."""
    found: dict[str, str] = {}
    for node in reversed(graph.nodes):
        before = [name for name in reads(node) if name not in tied]
        if not tied.isdisjoint(node.output):
            cut = f"the path is interrupted by {short_name(node.op_type, node.domain)} '{node.name}'"
        else:
            cut = next((found[name] for name in node.output if name in found), "")
        for name in before if cut else ():
            found.setdefault(name, cut)
    return found
