"""The checks of a proof, in order: each is a function of the case, and leaves in the case what later ones need."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from itertools import product

import numpy as np
from onnx import ModelProto

from onnxgrad_cli.common.memory import free_memory
from onnxgrad_cli.common.wording import listed
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.execution.observation import LARGE, PROVABLE, too_large, weight_bytes
from onnxgrad_cli.execution.runtime_errors import in_short, lacks_kernel
from onnxgrad_cli.execution.sizes import leading_symbols
from onnxgrad_cli.ir.dialects import complaint
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.nodes import reads
from onnxgrad_cli.ir.types import Arrays, in_words, shape_of
from onnxgrad_cli.metadata import started
from onnxgrad_cli.standard.gradient_operator import expand_gradients, has_gradients
from onnxgrad_cli.targets.standard import is_targeted, to_standard
from onnxgrad_cli.verification.agreement import agrees_with_slopes
from onnxgrad_cli.verification.batches import agrees_across_batches
from onnxgrad_cli.verification.case import NOTHING, Case, Found
from onnxgrad_cli.verification.feeds import DescribedModel, factors_off_zero, finite, first_run
from onnxgrad_cli.verification.finiteness import first_bad
from onnxgrad_cli.verification.forward_parts import computes_the_original
from onnxgrad_cli.verification.judgement import off
from onnxgrad_cli.verification.optimizer_step import agrees_with_reference
from onnxgrad_cli.verification.original import Original, with_weights

MOST_OPERATIONS = 10**12
"""Floating-point operations of one run up to which a model is proved unasked: some ten seconds."""

COPIES = 4
"""How many times the memory of the weights a proof takes at most."""

AFTER_THE_MODEL = frozenset({"label", "sample weight", "loss gradient"})
"""The roles of inputs that the loss has, and what comes after it."""

TARGETED = 1e-2
"""How far the operators of a target may be from the standard's, in float32, relative to a result's largest entry."""


def _is_valid(case: Case) -> Found:
    """Whether onnx's checker takes the model."""
    fault = complaint(Graph(case.model, case.path).skeleton(), full=True)
    return Found("failed", fault, ends=True) if fault else Found("passed", "full check")


def _is_quick(case: Case) -> Found:
    """Whether the model is proved unasked, in seconds."""
    large, weights = too_large(case.model, PROVABLE), weight_bytes(case.model)
    if weights > LARGE and COPIES * weights > free_memory():
        large = f"{weights / 1e6:,.0f} MB of weights, and {free_memory() / 1e6:,.0f} MB of memory free"
    if case.operations > MOST_OPERATIONS:
        large = f"{case.operations / 1e9:,.0f} billion operations in a run"
    if large and not case.force:
        return Found(ends=True, leaves_unproved=f"{large}: ask for it with --verify")
    return NOTHING


def _expands(case: Case) -> Found:
    """Whether the Gradient node of a compact model can be written out; the later checks work on what comes out."""
    if not has_gradients(case.model):
        return NOTHING
    case.model = expand_gradients(deepcopy(case.model), case.path)
    return Found("passed", f"{len(case.model.graph.node):,} nodes in all")


def _loads(case: Case) -> Found:
    """Whether onnxruntime takes the model, with its weights and with state as it is before the first step."""
    model = with_weights(started(case.model, case.roles), case.path)
    try:
        case.run = Executor(model, fallback=False, threads=None)
    except Exception as error:  # onnxruntime's exceptions share no base class
        fault = str(error).strip()[:500]
    else:
        case.described = DescribedModel(
            model, case.roles, case.cotangents, case.original, case.differentiated, case.run.stored
        )
        case.data = {**factors_off_zero(case.described, case.rng), **case.data}
        return Found("passed", case.run.name)
    if case.original is None or case.original.loads:
        return Found("failed", fault, ends=True)
    unproved = "onnxruntime does not load the original either"
    return Found("skipped", f"{unproved}: {fault}", ends=True, leaves_unproved=f"{unproved}: {fault}")


def runs(case: Case) -> Found:
    """Whether the model runs on the data given, or on random data of some size; on such that its original takes too."""
    original = case.original if case.original is not None and case.original.loads else None
    both = _Both(original, case.run) if original else None
    failure: Exception | None = None
    choices = [{**_single_batch(case), **case.sizes}, case.sizes] if case.is_long else [case.sizes]
    ways: list[Callable[[Arrays], Arrays]] = [both, case.run] if both else [case.run]
    for sizes, run in product(choices, ways):
        try:
            case.feeds, case.outputs, case.drawn = first_run(run, case.described, case.rng, case.data, sizes)
        except Exception as error:  # onnxruntime's exceptions share no base class
            failure = error
            continue
        fed = ", ".join(f"{name} {list(x.shape)}" for name, x in case.feeds.items())
        if both and both.failures and 1 in (case.drawn or {}).values():
            why = f"it fails where the original runs: {both.failures[0]}"
            return Found("failed", f"{fed}; with larger sizes {why}", ends=True)
        return Found("passed", fed)
    assert failure is not None
    why = in_short(failure)
    drawn = [name for name in case.roles.sampled if name not in case.data]
    if not drawn or (original is not None and _takes_something(original, case)):
        return Found("failed", why, ends=True)
    why = f"the {'original' if original is not None else 'model'} does not run on random data: {why}"
    if lacks_kernel(failure):
        why = f"onnxruntime lacks a kernel, so {why}"
        return Found("skipped", why, ends=True, leaves_unproved=why)
    symbols = [symbol for symbol in case.symbols if symbol not in case.sizes]
    why += f"; fix a size with --dim {symbols[0]}=SIZE, or " if symbols else "; "
    why += "give data with --test-data"
    types = {value.name: in_words(value.type) for value in case.described.model.graph.input}
    needed = ", ".join(f"{name} {types[name]}" for name in drawn[:8])
    return Found("skipped", f"{why}, for {needed}", ends=True, leaves_unproved=why)


def _single_batch(case: Case) -> dict[str, int]:
    """Return 1 for each symbol that leads the model's own inputs."""
    shapes = {value.name: shape_of(value.type) or () for value in case.described.model.graph.input}
    own = (name for name in case.roles.fed if case.roles.inputs[name] == "model input")
    leading = leading_symbols({name: shapes[name] for name in own if name not in case.described.cotangents})
    return {symbol: 1 for symbol, leads in leading.items() if leads}


class _Both:
    """A run of the original, and then of its training model, whose outputs count.

    Attributes:
        failures: why the training model did not run where the original did.
    """

    def __init__(self, original: Original, run: Executor) -> None:
        self._original, self._run = original, run
        self.failures: list[str] = []

    def __call__(self, feeds: Arrays) -> Arrays:
        self._original(feeds)
        try:
            return self._run(feeds)
        except Exception as error:  # onnxruntime's exceptions share no base class
            self.failures.append(in_short(error))
            raise


def _takes_something(original: Original, case: Case) -> bool:
    """Whether the original runs on some random data."""
    try:
        first_run(original, case.described, case.rng, case.data, case.sizes)
    except Exception:  # onnxruntime's exceptions share no base class
        return False
    return True


def _computes_the_standard(case: Case) -> Found:
    """Whether a target's operators give the loss and the gradients that those of the standard give."""
    if not is_targeted(case.model):
        return NOTHING
    model = ModelProto()
    model.CopyFrom(case.described.model)
    to_standard(model)
    expected = Executor(model, fallback=False, threads=None)(case.feeds)
    gradients = list(case.roles.gradients.values())  # not what an optimizer makes of them: it may amplify noise
    least = 1e-4 * max((np.max(np.abs(expected[name]), initial=0.0) for name in gradients), default=0.0)
    compared = [name for name in (case.roles.loss, *gradients) if finite(case.outputs[name])]
    worst = max((off(case.outputs[name], expected[name], least) for name in compared), default=0.0)
    return Found("passed" if worst <= TARGETED else "failed", f"largest relative difference {worst:.1e}")


def _is_finite(case: Case) -> Found:
    """Whether the loss and every gradient are finite; of data on which the loss is not, nothing follows."""
    bad = [name for name, x in case.outputs.items() if not finite(x)]
    if case.roles.loss in bad:
        where = first_bad(case.described, case.feeds, case.outputs[case.roles.loss])
        return Found(ends=True, leaves_unproved=f"its loss is not finite on these data{where}: give others")
    if bad:
        text = f"not finite: {', '.join(bad[:5])}"
        if tensors := [tensor for tensor, output in case.roles.gradients.items() if output in bad]:
            where = first_bad(case.described, case.feeds, np.array(np.nan)).removesuffix(" on")
            flags = " ".join(f"--freeze '{tensor}'" for tensor in tensors[:3])
            text += f", though the loss is{where}: leave such tensors untrained with {flags}"
        return Found("failed", text, ends=True)
    return Found("passed", "loss and every gradient")


def _covers_every_gradient(case: Case) -> Found:
    """Whether differences of the loss could speak of every gradient as a whole, by what the model says of itself."""
    roles = case.roles
    lacking = [name for name, role in roles.inputs.items() if role == "weight" and name not in roles.gradients]
    partial = [name for name in roles.partial if name in roles.gradients]
    if lacking:
        return Found("skipped", f"no output is the gradient of {listed(lacking)}")
    if partial:
        return Found("skipped", f"paths are declared to be stopped that the gradient of {listed(partial)} leaves out")
    if held := _held_unasked(case):
        return Found("skipped", f"{listed(held)} counts as a constant, and is no norm of an adapter")
    if late := _after_the_model(case, "kept output"):
        return Found("skipped", f"{listed(late)} depends on labels, and is described as an output of the model")
    if late := [] if roles.optimizer else _after_the_model(case, "next state"):
        return Found("skipped", f"{listed(late)} depends on labels, and is described as a running statistic")
    if read := _state_of_the_loss(case):
        return Found(
            "skipped", f"the loss reads {listed(read)}, described as state: no gradient tells it from a weight"
        )
    if named := _named_gradients(case):
        return Found("skipped", f"{listed(named)} is called a gradient, and described as something else")
    return NOTHING


def _held_unasked(case: Case) -> list[str]:
    """What counts as a constant, and hides a part of a gradient so; a norm that DoRA holds is one by its definition.

    Such a norm follows from both factors of an adapter and from no other weight or data; the loss reads it as what the
    magnitudes are divided by, and in no other way.
    """
    graph = Graph(case.model)
    makers, before = graph.producers(), graph.ancestors([case.roles.loss]) if case.roles.held else set()
    others = {name for name, role in case.roles.inputs.items() if role != "constant"}

    def is_norm(name: str) -> bool:
        uses = [node for node in graph.nodes if name in reads(node) and not before.isdisjoint(node.output)]
        divided = {(node.op_type, *node.input[1:]) for node in uses} == {("Div", name)}
        of = graph.ancestors([node.input[0] for node in uses]) & others
        by = graph.ancestors([name]) & others
        factors = [{adapter.a, adapter.b} for adapter in case.roles.adapters if {adapter.magnitude} == of]
        return makers[name].op_type == "Sqrt" and divided and by in factors

    return [name for name in case.roles.held if name in before and not is_norm(name)]


def _after_the_model(case: Case, role: str) -> list[str]:
    """Outputs of a role whose values the model alone makes, and that depend on what it does not know: they may be
    gradients."""
    found = [name for name, said in case.roles.outputs.items() if said.role == role]
    late = {case.roles.loss, *(name for name, role in case.roles.inputs.items() if role in AFTER_THE_MODEL)}
    for node in Graph(case.model).nodes if found else ():
        if not late.isdisjoint(reads(node)):
            late.update(filter(None, node.output))
    return [name for name in found if name in late]


def _state_of_the_loss(case: Case) -> list[str]:
    """What is described as state and is read on the way to the loss.

    What changes from step to step and is no weight is read by none: statistics of the batch stand for running ones, and
    the optimizer's state, its loss scale too, comes after the loss.
    """
    state = [name for name, role in case.roles.inputs.items() if role == "state"]
    before = Graph(case.model).ancestors([case.roles.loss]) if state else set()
    return [name for name in state if name in before]


def _named_gradients(case: Case) -> list[str]:
    """Outputs that are called as a build calls the gradient of an input, or of what is stored, and have another role;
    the original's own, which are compared with what it computes, may be called so."""
    own = {value.name for value in case.original.model.graph.output} if case.original is not None else set()
    tensors = {*case.roles.inputs, *(tensor.name for tensor in case.model.graph.initializer)} - set(
        case.roles.gradients
    )
    gradients = {f"{name}_grad" for name in tensors}
    return [name for name in case.roles.outputs if name in gradients - own]


Check = Callable[[Case], Found]

OPENING: tuple[tuple[str, Check], ...] = (
    ("onnx checker", _is_valid),
    ("size", _is_quick),
    ("its Gradient node can be written out", _expands),
    ("loads in onnxruntime", _loads),
    ("runs", runs),
)
"""What must hold of any model before its numbers are looked at."""

ORIGINAL: tuple[str, Check] = ("computes what the original computes", computes_the_original)

CHECKS: tuple[tuple[str, Check], ...] = (
    *OPENING,
    ORIGINAL,
    ("computes what the operators of the standard compute", _computes_the_standard),
    ("finite", _is_finite),
    ("batches of other sizes", agrees_across_batches),
    ("gradients against differences of the loss", agrees_with_slopes),
    ("every gradient as a whole", _covers_every_gradient),
    ("the optimizer's step against a reference", agrees_with_reference),
)
"""Each check and the name of its step in the proof."""
