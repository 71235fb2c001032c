"""The checks of a proof, in order, and `checked`, which runs them within the limits of time and memory.

Each check is a function that takes a `ProofCase` and may store values in it for later checks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from itertools import product

import numpy as np

from onnxgrad_cli.common.flags import listed
from onnxgrad_cli.common.memory import free_memory
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.execution.kernels import in_short, lacks_kernel
from onnxgrad_cli.execution.limits import OverLimit, within_budget
from onnxgrad_cli.execution.observation import MAX_WEIGHT_BYTES, PROVABLE, too_large, weight_bytes
from onnxgrad_cli.execution.sizes_to_try import leading_symbols
from onnxgrad_cli.ir.dialects import checker_error
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node_values import depending_on, has_gradients, reads
from onnxgrad_cli.ir.types import Arrays, in_words
from onnxgrad_cli.ir.weightless_copy import copied
from onnxgrad_cli.metadata import started
from onnxgrad_cli.standard.gradient_operator import expand_gradients
from onnxgrad_cli.targets.standard import is_targeted, to_standard
from onnxgrad_cli.verification.case import NOTHING, CheckOutcome, ProofCase, skipped
from onnxgrad_cli.verification.checks.agreement import agrees_with_slopes
from onnxgrad_cli.verification.checks.batch_sizes import agrees_across_batches
from onnxgrad_cli.verification.checks.finiteness import first_bad
from onnxgrad_cli.verification.checks.forward_parts import computes_the_original
from onnxgrad_cli.verification.checks.optimizer_step import agrees_with_reference
from onnxgrad_cli.verification.feeds import DescribedModel, factors_off_zero, finite, first_run
from onnxgrad_cli.verification.gradients.judgement import off
from onnxgrad_cli.verification.original_model import Original, with_weights
from onnxgrad_cli.verification.verdict import Proof, ProofStep

MOST_OPERATIONS = 10**12
"""If one run takes more floating-point operations than this (about ten seconds), a model is not proved by default."""

COPIES = 4
"""Largest memory that a proof takes, as a multiple of the memory of the weights."""

AFTER_THE_MODEL = frozenset({"label", "sample weight", "loss weight", "loss gradient"})
"""Roles of inputs that only the loss and the nodes after it read, not the model itself."""

TARGETED = 1e-2
"""Largest accepted difference between a target's own operators and standard ones, relative to the largest entry."""


def _is_valid(case: ProofCase) -> CheckOutcome:
    """Check the model with onnx's checker."""
    fault = checker_error(Graph(case.model, case.path).skeleton(), full=True)
    return CheckOutcome("failed", fault, ends=True) if fault else CheckOutcome("passed", "full check")


def _is_quick(case: ProofCase) -> CheckOutcome:
    """End the proof if it would take more than a few seconds, or too much memory, unless the user requested it."""
    large, weights = too_large(case.model, PROVABLE), weight_bytes(case.model)
    if weights > MAX_WEIGHT_BYTES and COPIES * weights > free_memory():
        large = f"{weights / 1e6:,.0f} MB of weights, but only {free_memory() / 1e6:,.0f} MB of free memory"
    if case.operations > MOST_OPERATIONS:
        large = f"{case.operations / 1e9:,.0f} billion operations per run"
    if large and not case.force:
        return CheckOutcome(ends=True, leaves_unproved=f"{large}; --verify checks the model anyway")
    return NOTHING


def _expands(case: ProofCase) -> CheckOutcome:
    """Replace the Gradient node of a model, if it has one, by standard operators. Later checks use the new model."""
    if not has_gradients(case.model):
        return NOTHING
    case.model = expand_gradients(copied(case.model), case.path)
    return CheckOutcome("passed", f"{len(case.model.graph.node):,} nodes in all")


def _loads(case: ProofCase) -> CheckOutcome:
    """Load the model in onnxruntime, with its weights and its initial state."""
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
        return CheckOutcome("passed", case.run.name)
    if case.original is None or case.original.loads:
        return CheckOutcome("failed", fault, ends=True)
    return _ended(f"onnxruntime does not load the original either: {fault}")


def runs(case: ProofCase) -> CheckOutcome:
    """Run the model on the given data, or on random data of various sizes.

    If possible, the data are such that the original runs on them, too.
    """
    original = case.original if case.original is not None and case.original.loads else None
    failures: list[str] = []

    def both(feeds: Arrays) -> Arrays:
        assert original is not None
        original(feeds)
        try:
            return case.run(feeds)
        except Exception as error:  # onnxruntime's exceptions share no base class
            failures.append(in_short(error))
            raise

    failure: Exception | None = None
    leading = leading_symbols({name: case.described.shapes[name] for name in case.described.own})
    single = {symbol: 1 for symbol, leads in leading.items() if leads}
    choices = [{**single, **case.sizes}, case.sizes] if case.is_long else [case.sizes]
    ways: list[Callable[[Arrays], Arrays]] = [both, case.run] if original else [case.run]
    for sizes, run in product(choices, ways):
        try:
            case.feeds, case.outputs, case.drawn = first_run(run, case.described, case.rng, case.data, sizes)
        except Exception as error:  # onnxruntime's exceptions share no base class
            failure = error
            continue
        fed = ", ".join(f"{name} {list(x.shape)}" for name, x in case.feeds.items())
        if failures and 1 in (case.drawn or {}).values():
            why = f"it fails, but the original runs: {failures[0]}"
            return CheckOutcome("failed", f"{fed}; with larger sizes {why}", ends=True)
        return CheckOutcome("passed", fed)
    assert failure is not None
    return _does_not_run(case, original, failure)


def _does_not_run(case: ProofCase, original: Original | None, failure: Exception) -> CheckOutcome:
    """Return the outcome for a model that runs on no data: it is wrong, or the data don't suit it."""
    why = in_short(failure)
    drawn = [name for name in case.roles.sampled if name not in case.data]
    if not drawn or (original is not None and _takes_something(original, case)):
        return CheckOutcome("failed", why, ends=True)
    why = f"the {'original' if original is not None else 'model'} does not run on random data: {why}"
    if lacks_kernel(failure):
        return _ended(f"onnxruntime has no kernel for a node, so {why}")
    symbols = [symbol for symbol in case.symbols if symbol not in case.sizes]
    why += f"; set a size with --dim {symbols[0]}=SIZE, or " if symbols else "; "
    why += "pass data with --test-data"
    needed = ", ".join(f"{name} {in_words(case.described.types[name])}" for name in drawn[:8])
    return _ended(why, f", for {needed}")


def _takes_something(original: Original, case: ProofCase) -> bool:
    """Return True if the original runs on some random data."""
    with suppress(Exception):  # onnxruntime's exceptions share no base class
        first_run(original, case.described, case.rng, case.data, case.sizes)
        return True
    return False


def _computes_the_standard(case: ProofCase) -> CheckOutcome:
    """For a model with a target's own operators: compare loss and gradients with the results of standard operators."""
    if not is_targeted(case.model):
        return NOTHING
    model = copied(case.described.model)
    to_standard(model)
    expected = Executor(model, fallback=False, threads=None)(case.feeds)
    gradients = list(case.roles.gradients.values())  # no optimizer results: these may amplify noise
    least = 1e-4 * max((np.max(np.abs(expected[name]), initial=0.0) for name in gradients), default=0.0)
    compared = [name for name in (case.roles.loss, *gradients) if finite(case.outputs[name])]
    worst = max((off(case.outputs[name], expected[name], least) for name in compared), default=0.0)
    return CheckOutcome("passed" if worst <= TARGETED else "failed", f"largest relative difference {worst:.1e}")


def _is_finite(case: ProofCase) -> CheckOutcome:
    """Check that the loss and every gradient are finite.

    If the loss is not finite, the proof ends without a verdict on the model.
    """
    bad = [name for name, x in case.outputs.items() if not finite(x)]
    if case.roles.loss in bad:
        where = first_bad(case.described, case.feeds, case.outputs[case.roles.loss])
        return CheckOutcome(ends=True, leaves_unproved=f"its loss is not finite on these data{where}; pass other data")
    if bad:
        text = f"not finite: {', '.join(bad[:5])}"
        if tensors := [tensor for tensor, output in case.roles.gradients.items() if output in bad]:
            where = first_bad(case.described, case.feeds, np.array(np.nan)).removesuffix(" on")
            flags = " ".join(f"--freeze '{tensor}'" for tensor in tensors[:3])
            text += "; the loss is finite" + (f", and the first NaN is{where.removeprefix(',')}" if where else "")
            if len(tensors) < len(case.roles.gradients):
                text += f": freeze these tensors with {flags}"
        return CheckOutcome("failed", text, ends=True)
    return CheckOutcome("passed", "loss and every gradient")


def _covers_every_gradient(case: ProofCase) -> CheckOutcome:
    """Skip if a gradient is missing, or if the model's description could hide a gradient that no check compares."""
    roles = case.roles
    faults = {
        "no output is the gradient of {}": [
            name for name, role in roles.inputs.items() if role == "weight" and name not in roles.gradients
        ],
        "the gradient of {} leaves out paths on which gradients are stopped": [
            name for name in roles.partial if name in roles.gradients
        ],
        "{} is treated as a constant, but is not a norm of an adapter": _held_unasked(case),
        "{} depends on labels, but is described as an output of the model": _after_the_model(case, "kept output"),
        "{} depends on labels, but is described as a running statistic": (
            [] if roles.optimizer else _after_the_model(case, "next state")
        ),
        "the loss reads {}, which is described as state, but could be a weight without a gradient": (
            _state_of_the_loss(case)
        ),
        "{} has the name of a gradient, but is described as something else": _named_gradients(case),
    }
    return next((skipped(text.format(listed(names))) for text, names in faults.items() if names), NOTHING)


def _held_unasked(case: ProofCase) -> list[str]:
    """Return the values declared constant that hide a part of a gradient, except the norms that DoRA keeps constant.

    Such a norm depends on both LoRA matrices of an adapter and on no other weight or data. The loss divides the
    magnitudes by the norm, and reads it in no other way.
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


def _after_the_model(case: ProofCase, role: str) -> list[str]:
    """Return the outputs of a role that depend on the loss or on inputs that the model does not read.

    Such an output may be a gradient. The inputs are those with a role in `AFTER_THE_MODEL`, such as labels.

    Args:
        case: the case.
        role: a role for values that the model computes without the loss, such as 'kept output'.
    """
    found = [name for name, said in case.roles.outputs.items() if said.role == role]
    first = {case.roles.loss, *(name for name, role in case.roles.inputs.items() if role in AFTER_THE_MODEL)}
    late = depending_on(Graph(case.model).nodes if found else (), first)
    return [name for name in found if name in late]


def _state_of_the_loss(case: ProofCase) -> list[str]:
    """Return the inputs that are described as state and that the loss depends on.

    A loss that onnxgrad builds reads no state. Statistics of the batch replace the running ones, and the optimizer's
    state, including its loss scale, is read after the loss.
    """
    state = [name for name, role in case.roles.inputs.items() if role == "state"]
    before = Graph(case.model).ancestors([case.roles.loss]) if state else set()
    return [name for name in state if name in before]


def _named_gradients(case: ProofCase) -> list[str]:
    """Return the outputs that have the name of a gradient but another role.

    A build names the gradient of an input or a stored tensor after that tensor. Outputs of the original may have such a
    name, and are left out: their values are compared with the original's.
    """
    own = {value.name for value in case.original.model.graph.output} if case.original is not None else set()
    tensors = {*case.roles.inputs, *(tensor.name for tensor in case.model.graph.initializer)} - set(
        case.roles.gradients
    )
    gradients = {f"{name}_grad" for name in tensors}
    return [name for name in case.roles.outputs if name in gradients - own]


Check = Callable[[ProofCase], CheckOutcome]

OPENING: tuple[tuple[str, Check], ...] = (
    ("onnx checker", _is_valid),
    ("size", _is_quick),
    ("its Gradient node can be written out", _expands),
    ("loads in onnxruntime", _loads),
    ("runs", runs),
)
"""Checks that every model must pass before its results are checked, as (name of the step, function)."""

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
"""The checks of a training model in order, as (name of the step in the proof, function)."""


def checked(case: ProofCase, checks: Iterable[tuple[str, Check]], note: Callable[[str], object]) -> Proof:
    """Run checks on a case in order, and return the proof.

    `note` is called with the name of each check as it starts.
    """
    proof = Proof()
    with within_budget(limited=not case.force) as patience:
        if patience is not None:
            stored = case.original.model if case.original is not None else case.model
            patience.allow(weight_bytes(case.model), len(stored.graph.node), case.operations)
        for name, check in checks:
            note(name)
            start = time.perf_counter()
            found = NOTHING
            with suppress(OverLimit), patience.taking() if patience else nullcontext():
                found = check(case)
            if patience is not None and patience.spent:
                found = _ended(f"the proof takes more than {patience.spent}; --verify runs it anyway")
            if found.status:
                proof.steps.append(ProofStep(name, found.status, found.detail, time.perf_counter() - start))
            if found.status == "failed":
                proof.status = "failed"
            if found.leaves_unproved:
                proof.status, proof.reason = "skipped", f"{name}: {found.leaves_unproved}"
            if found.ends:
                break
    proof.executor = case.measured_by
    proof.sizes = {symbol: size for symbol, size in (case.drawn or {}).items() if symbol in case.symbols}
    proof.conclude()
    return proof


def _ended(reason: str, detail: str = "") -> CheckOutcome:
    """Return a skipped outcome that ends the proof and leaves the model unproved."""
    return CheckOutcome("skipped", reason + detail, ends=True, leaves_unproved=reason)
