"""Which float tensors of a model are weights to be trained, and which are constants by the role they play.

A file does not say which of its initializers were parameters, so the choice follows from where each is read.
Every decision is recorded with its reason; `--train`, `--preset` and `--train-last` narrow it, and `--freeze` overrides
them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from onnxgrad_cli.autodiff import registry
from onnxgrad_cli.autodiff.activity import carriers, open_reads
from onnxgrad_cli.common.wording import listed
from onnxgrad_cli.errors import Caution, Refusal, UnsupportedError
from onnxgrad_cli.ir.domains import full_name, short_name
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.modules import known_as
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.nodes import reads
from onnxgrad_cli.ir.types import is_float
from onnxgrad_cli.options import SelectionOptions
from onnxgrad_cli.passes.parameters import presets
from onnxgrad_cli.passes.parameters.constants import ConstantRoles, Decision
from onnxgrad_cli.passes.parameters.patterns import matches, matching
from onnxgrad_cli.passes.parameters.tie import twins
from onnxgrad_cli.passes.parameters.untie import owners_of
from onnxgrad_cli.passes.parameters.untrained import integer_weights, untrained
from onnxgrad_cli.passes.quantized_matrices import is_integer, quantized_matrices
from onnxgrad_cli.record import SelectionRecord

TIE = "`tie`"
"""What cautions about weights that may be one are about."""

UNTIED = "no differentiable path ties it to the loss"

FROZEN = "frozen by `freeze`"
"""Why a weight that `freeze` matches is not trained."""

QUANTIZED = "quantized: integers have no gradient"

ByName = Mapping[str, list[str]]
"""Pattern -> the weights whose own names it matches, not those of the modules that read them."""


def select(graph: Graph, options: SelectionOptions, training: SelectionRecord) -> None:
    """Fill `training.trained`, `.not_trained` and `.grad_of_input`, in the order of the model's initializers.

    With adapters, what would be trained without them and is not chosen by name goes to `training.adaptable`.

    Raises:
        UsageError: a pattern or a preset names nothing.
        UnsupportedError: a chosen tensor is not tied to the loss, or nothing is left to differentiate by, where
            something must be.
    """
    floats = _weights(graph)
    tied = _tied(graph, training.predictions)
    known = known_as(graph.nodes, floats) if options.train or options.freeze else None
    asked = matching(options.train, floats, "`train`", "float weights", known)
    by_name = {pattern: [name for name in asked if matches(name, pattern)] for pattern in options.train}
    frozen = dict.fromkeys(matching(options.freeze, floats, "`freeze`", "float weights", known), FROZEN)
    training.grad_of_input = matching(
        options.grad_of_input, _inputs(graph, training), "`grad_of_input`", "float inputs"
    )
    unfit = _unfit(graph, training, floats, tied, by_name)
    fit = [name for name in floats if name not in unfit and name not in frozen]
    chosen = {*asked, *presets.chosen(graph, options, training.predictions, fit)}
    if options.lora:
        training.adaptable = [name for name in fit if name not in chosen]
    reasons = {**unfit, **_not_chosen(options, training.adaptable, set(floats) - chosen), **frozen}
    training.not_trained.update((name, reasons[name]) for name in floats if name in reasons)
    training.trained = [name for name in floats if name not in reasons]
    _refuse_untied(graph, training.predictions, tied, by_name, frozen)
    training.cautions.extend([*_shared(graph, training.trained), *_transposed(graph, training.trained)])
    training.not_trained.update(dict.fromkeys(_quantized(graph), QUANTIZED))
    training.not_trained.update(_in_unknown_forms(graph))
    training.cautions.extend(untrained(graph, options, training))
    if not (training.may_be_none or _is_any(graph, options, training)):
        raise _nothing(graph, floats, training, options)


def _weights(graph: Graph) -> list[str]:
    """The float initializers that the model had."""
    return [name for name in graph.initializers if is_float(graph.types[name]) and not graph.added(name)]


def _inputs(graph: Graph, training: SelectionRecord) -> list[str]:
    """The float inputs that the model had."""
    return [name for name in training.inputs if is_float(graph.types.get(name))]


def _is_any(graph: Graph, options: SelectionOptions, training: SelectionRecord) -> bool:
    """Whether there is anything to differentiate with respect to: weights, what adapters stand beside, or inputs."""
    adapted = training.adaptable or (options.lora and quantized_matrices(graph))
    return bool(training.trained or adapted or training.grad_of_input)


def _refuse_untied(
    graph: Graph, predictions: list[str], tied: set[str], by_name: ByName, frozen: Collection[str]
) -> None:
    """Refuse a weight without a path to the loss that `train` names, or that a glob matches beside no other one."""
    for pattern, hits in by_name.items():
        untied = [name for name in hits if name not in tied and name not in frozen]
        if untied and (pattern in untied or len(untied) == len(hits)):
            cut = _cuts(graph, tied).get(untied[0])
            where = f": {cut}" if cut else ""
            raise UnsupportedError(
                f"`train`: no differentiable path ties '{untied[0]}' to {listed(predictions)}{where}"
            )


def _quantized(graph: Graph) -> list[str]:
    nodes = [node for node in graph.nodes if node.op_type == "DequantizeLinear"]
    return [node.input[0] for node in nodes if node.input[0] in graph.initializers]


def _in_unknown_forms(graph: Graph) -> dict[str, str]:
    """The matrices of integers that are read by nodes which no definition covers, and why."""
    stored = {name for name, tensor in graph.initializers.items() if is_integer(tensor) and len(tensor.dims) > 1}
    return {
        name: f"{graph.unexpanded[node.name]}, as '{node.name}' ({node.op_type}) reads it"
        for node in graph.nodes if node.name in graph.unexpanded
        for name in node.input if name in stored
    }  # fmt: skip


def _unfit(
    graph: Graph, training: SelectionRecord, floats: list[str], tied: set[str], by_name: ByName
) -> dict[str, str]:
    """Those of `floats` that can't be trained, or have not been asked for and are constants by role, and why."""
    reached = _tied(graph, training.predictions, reads) if any(registry.all_stopped()) else tied
    roles = ConstantRoles(graph)
    released = {*training.learned_scales, *_released(roles, by_name, tied)}
    cuts = {} if tied.issuperset(floats) else _cuts(graph, tied)

    def reason(name: str) -> str:
        if name in training.state:
            return f"a running statistic: '{training.state[name]}' is its next value"
        if name in tied:
            role = Decision("option") if name in released else roles.decide(name)
            if role.reason:
                training.heuristics[name] = role.heuristic
            return role.reason or roles.infinite(name)
        if name in reached:
            return "gradients stop at the operands through which it reaches the loss"
        return UNTIED + (f": {cuts[name]}" if name in cuts else "")

    reasons = {name: reason(name) for name in floats}
    if all(reasons.values()):  # a formula may be how somebody has filled the only weights there are
        reasons = {name: reason for name, reason in reasons.items() if name not in roles.by_values}
    training.heuristics = {name: each for name, each in training.heuristics.items() if name in reasons}
    doubts = {name: text for name, text in roles.doubts.items() if name not in roles.by_values or name in reasons}
    training.cautions.extend(Caution("note", name, text) for name, text in doubts.items())
    return {name: reason for name, reason in reasons.items() if reason}


def _released(roles: ConstantRoles, by_name: ByName, tied: Collection[str]) -> Iterator[str]:
    """Yield tensors to train whatever their role: named exactly, or matched by a glob that matches no parameter."""
    for pattern, hits in by_name.items():
        found = [name for name in hits if name in tied]
        if pattern in found:
            yield pattern
        elif not any(not roles.reason(name) for name in found):
            yield from found


def _not_chosen(options: SelectionOptions, adaptable: list[str], others: set[str]) -> dict[str, str]:
    """The weights that are left alone because options name others or ask for adapters, and why."""
    if options.lora:
        return dict.fromkeys(adaptable, "frozen: adapters are trained instead")
    choices = _choices(options)
    return dict.fromkeys(others, f"not named by {choices}") if choices else {}


def _choices(options: SelectionOptions) -> str:
    """The options that name what is trained, in words; "" where all is."""
    names = ["`train`"] if options.train else []
    names += [f"`preset={name!r}`" for name in options.preset]
    names += [f"`train_last={options.train_last}`"] if options.train_last else []
    return " or ".join(names)


def _shared(graph: Graph, trained: list[str]) -> Iterator[Caution]:
    """Weights of several modules: shared there, or equal, so that an exporter has written them once."""
    if graph.derived:  # a weight is read by its module and by the derivative of that
        return
    for name, owners in owners_of(graph, trained).items():
        if len(owners) > 1:
            text = (
                f"'{name}' is read by {listed(owners)}: trained as one weight. Exporters merge weights of equal "
                "values, too; `untie` parts them"
            )
            yield Caution("note", name, text)


def _transposed(graph: Graph, trained: list[str]) -> Iterator[Caution]:
    """Name the trained weights that hold the values of another one transposed."""
    for name, of, transposed in twins(graph, trained):
        if transposed:
            text = f"'{name}' is '{of}' transposed: they are trained as two weights. `tie={name!r}` trains them as one"
            yield Caution("note", TIE, text)


def _nothing(graph: Graph, floats: list[str], training: SelectionRecord, options: SelectionOptions) -> UnsupportedError:
    """The error where no weight and no input is left to differentiate with respect to."""
    refusals = list(_never_differentiated(graph))
    if not floats:
        return UnsupportedError(
            "the model has no float initializer: there is nothing to train",
            refusals,
            hint=None if refusals else "gradients of its float inputs can be had with `grad_of_input='*'`",
        )
    reasons = [f"{name}: {reason}" for name, reason in list(training.not_trained.items())[:20]]
    hint = "choose weights with `train=GLOB`"
    if FROZEN in training.not_trained.values():
        hint = "leave `freeze` out, or freeze fewer weights"
    if integer_weights(graph).dequantized and not options.straight_through:
        hint = "pass `quantization='ste'` to train what is stored as integers by the straight-through estimator"
    return UnsupportedError("no weight is left to train:", refusals, hint, reasons)


def _never_differentiated(graph: Graph) -> Iterator[Refusal]:
    """The nodes behind which no weight can be trained: refused by name, or not covered by their definition.

    Those of the second kind may have weights among their attributes, which only a definition would make tensors of.
    """
    for node in graph.nodes:
        rule = registry.lookup(node.op_type, node.domain, graph.opset(node.domain) or 1)
        operator = full_name(node.op_type, node.domain)
        if rule is not None and rule.refusal:
            yield Refusal(node.name, operator, rule.refusal, rule.hint)
        elif node.name in graph.unexpanded:
            yield Refusal(node.name, operator, graph.unexpanded[node.name])


def _tied(graph: Graph, outputs: list[str], read: Callable[[Node], Sequence[str]] = open_reads) -> set[str]:
    """Every value that a path ties to `outputs`, through operators with a derivative or one that is refused.

    Where floats become integers the path ends, unless they were quantized.
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
    """The values that reach what is tied to the loss, but not by a differentiable path -> what cuts it, in words."""
    found: dict[str, str] = {}
    for node in reversed(graph.nodes):
        before = [name for name in reads(node) if name not in tied]
        if not tied.isdisjoint(node.output):
            cut = f"it is cut by {short_name(node.op_type, node.domain)} '{node.name}'"
        else:
            cut = next((found[name] for name in node.output if name in found), "")
        for name in before if cut else ():
            found.setdefault(name, cut)
    return found
