"""The checks of a proof, in order: each is a function of the case, and leaves in the case what later ones need."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from copy import deepcopy
from pathlib import Path

import numpy as np
from onnx import ModelProto, helper, numpy_helper

from onnxgrad_cli.execution.double import DoubleExecutor
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.execution.limits import OverLimit
from onnxgrad_cli.execution.observation import QUICK
from onnxgrad_cli.files import load_external_data
from onnxgrad_cli.ir.dialects import complaint
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.skeleton import copied
from onnxgrad_cli.ir.types import FLOATS, Arrays, in_words, is_external, is_float, nbytes
from onnxgrad_cli.metadata import started
from onnxgrad_cli.standard.gradient_operator import expand_gradients, has_gradients
from onnxgrad_cli.targets.standard import is_targeted, to_standard
from onnxgrad_cli.verification.agreement import agrees_with_slopes
from onnxgrad_cli.verification.case import NOTHING, Case, Found
from onnxgrad_cli.verification.feeds import DescribedModel, factors_off_zero, finite, first_run, part
from onnxgrad_cli.verification.judgement import off
from onnxgrad_cli.verification.loss_function import in_last_digits

TARGETED = 1e-2
"""How far the operators of a target may be from the standard's, in float32, relative to a result's largest entry."""


AMPLIFIED = 1e-2
"""The relative change of an output, by a change in the last digits of the data, from which nothing can be compared."""

DOUBLE = 1e-6
"""How far the forward parts may be apart in float64, relative to the largest entry of an output."""

LARGE, LONG = QUICK, 20_000
"""Bytes of weights and nodes above which the proof is made only when asked for: it takes more than seconds."""

ROUNDING = frozenset({"MatMulNBits", "QMoE"})
"""Operators whose attribute `accuracy_level` lets onnxruntime round; no gradient is that of what is rounded."""


def _is_valid(case: Case) -> Found:
    """Whether onnx's checker takes the model."""
    fault = complaint(Graph(case.model, case.path).skeleton(), full=True)
    return Found("failed", fault, ends=True) if fault else Found("passed", "full check")


def _is_small(case: Case) -> Found:
    """Whether the model is proved unasked, in seconds."""
    weight_bytes = sum(nbytes(tensor) for tensor in case.model.graph.initializer)
    large = f"{weight_bytes / 1e6:,.0f} MB of weights" if weight_bytes > LARGE else ""
    long = f"{len(case.model.graph.node):,} nodes" if len(case.model.graph.node) > LONG else ""
    if (large or long) and not case.force:
        return Found(ends=True, leaves_unproved=f"{large or long}: ask for it with --verify")
    return NOTHING


def _expands(case: Case) -> Found:
    """Whether the Gradient node of a compact model can be written out; the later checks work on what comes out."""
    if not has_gradients(case.model):
        return NOTHING
    case.model = expand_gradients(deepcopy(case.model), case.path)
    return Found("passed", f"{len(case.model.graph.node):,} nodes in all")


def _loads(case: Case) -> Found:
    """Whether onnxruntime takes the model, with its weights and with state as it is before the first step."""
    model = _with_weights(started(case.model, case.roles), case.path)
    case.described = DescribedModel(model, case.roles)
    case.data = {**factors_off_zero(case.described, case.rng), **case.data}
    if case.original is not None:
        case.original = _with_weights(case.original, case.path)
    try:
        case.run = Executor(model, fallback=False)
        return Found("passed", case.run.name)
    except Exception as error:  # onnxruntime's exceptions share no base class
        fault = str(error).strip()[:500]
    if case.original is None or _original_run(case) is not None:
        return Found("failed", fault, ends=True)
    unproved = "onnxruntime does not load the original either"
    return Found("skipped", f"{unproved}: {fault}", ends=True, leaves_unproved=f"{unproved}: {fault}")


def _with_weights(model: ModelProto, path: Path | None) -> ModelProto:
    """The model with its external data loaded, as a copy where there are any; else the model itself."""
    if not any(is_external(tensor) for tensor in model.graph.initializer):
        return model
    loaded = copied(model)
    load_external_data(loaded, path)
    return loaded


def _runs(case: Case) -> Found:
    """Whether the model runs on the data given, or on random data of some size; on such that its original takes too."""
    original = _original_run(case)
    failure = ""
    for run in (_both(original, case.run), case.run) if original else (case.run,):
        try:
            case.feeds, case.outputs, case.drawn = first_run(run, case.described, case.rng, case.data, case.sizes)
            return Found("passed", ", ".join(f"{name} {list(x.shape)}" for name, x in case.feeds.items()))
        except OverLimit:
            raise
        except Exception as error:  # onnxruntime's exceptions share no base class
            failure = str(error).strip()[:500]
    if original is None or _takes_something(original, case):
        return Found("failed", failure, ends=True)
    types = {value.name: in_words(value.type) for value in case.described.model.graph.input}
    needed = [f"{name} {types[name]}" for name in case.roles.sampled if name not in case.data]
    return Found(
        "skipped",
        f"the original does not run on random data either: give data for {', '.join(needed[:8])}; {failure}",
        ends=True,
        leaves_unproved="the model does not run on random data: give some of its own with --test-data",
    )


Run = Callable[[Arrays], Arrays]


def _original_run(case: Case) -> Run | None:
    """The original's run on feeds for its training model; None where there is none, or onnxruntime does not load it."""
    if case.original is None:
        return None
    taken = {value.name for value in case.original.graph.input}
    try:
        run = Executor(case.original, fallback=False)
    except Exception:  # onnxruntime's exceptions share no base class
        return None
    return lambda feeds: run({name: x for name, x in feeds.items() if name in taken})


def _both(original: Run, run: Run) -> Run:
    """A run of the original, and then of its training model, whose outputs count."""

    def both(feeds: Arrays) -> Arrays:
        original(feeds)
        return run(feeds)

    return both


def _takes_something(original: Run, case: Case) -> bool:
    """Whether the original runs on some random data."""
    try:
        first_run(original, case.described, case.rng, case.data, case.sizes)
    except Exception:  # onnxruntime's exceptions share no base class
        return False
    return True


def _computes_the_original(case: Case) -> Found:
    """Whether the outputs that the original has too are those that the original computes."""
    if case.original is None:
        return NOTHING
    model, original = case.described.model, case.original
    types = {value.name: value.type for value in original.graph.output}
    made = {name for node in model.graph.node for name in node.output}
    names = [name for name in types if name in made]
    if not names:
        return Found("skipped", "the loss judges a value that is no output of the original")
    probe = copied(model)
    del probe.graph.output[:]
    probe.graph.output.extend(helper.make_value_info(name, types[name]) for name in names)
    taken = {value.name: value.type for value in original.graph.input}
    given = {name: x for name, x in case.feeds.items() if name in taken}
    try:  # the training model may run where its original does not
        before = Executor(_unrounded(original))
        expected = before(given)
    except Exception as error:  # the executors' exceptions share no base class
        return Found("skipped", f"the original does not run: {str(error).strip()[:500]}")
    inputs = {name: x for name, x in case.feeds.items() if name in case.roles.fed}  # and the weights as stored
    got = Executor(part(probe), fallback=False)(inputs)
    names = [name for name in names if isinstance(got[name], np.ndarray)]
    worst = max((off(got[name], expected[name]) for name in names), default=0.0)
    rough = any(got[name].dtype.itemsize < 4 for name in names)
    rough |= any(node.op_type == "QMoE" for node in original.graph.node)  # of 8 bits in blocks: it rounds unasked
    allowed = 2e-2 if rough else 1e-4
    if worst > allowed:  # by the arithmetic of these data itself?
        near = {name: in_last_digits(x, case.rng) if is_float(taken[name]) else x for name, x in given.items()}
        changed = Executor(_with_last_digits_changed(original, case.roles.gradients, case.rng))(near)
        noise = max(off(changed[name], expected[name]) for name in names)
        allowed += 10 * noise
        if noise > AMPLIFIED and worst <= allowed:
            return _computes_the_original_in_double(probe, _unrounded(original), names, case, noise)
    status = "passed" if worst <= allowed else "failed"
    return Found(status, f"largest relative difference {worst:.1e} ({before.name})")


def _computes_the_original_in_double(
    probe: ModelProto, original: ModelProto, names: Sequence[str], case: Case, noise: float
) -> Found:
    """Whether two models have the same outputs of these names in float64, where float32 can't tell for its noise."""
    told = f"a change in the last digits changes the original by {noise:.1e}"
    try:
        runs = DoubleExecutor(original), DoubleExecutor(part(probe))
        expected, got = (run(run.widened(case.feeds)) for run in runs)
    except Exception:  # the executors' exceptions share no base class
        return Found("skipped", f"of these data {told}")
    worst = max(off(got[name], expected[name]) for name in names)
    status = "passed" if worst <= DOUBLE else "failed"
    return Found(status, f"largest relative difference {worst:.1e} in float64; {told}")


def _with_last_digits_changed(model: ModelProto, names: Container[str], rng: np.random.Generator) -> ModelProto:
    """The model with weights of these names that its precision hardly tells from its own.

    Not any float may change so: sizes are computed from some, as from the scales of Resize.
    """
    changed = copied(_unrounded(model))
    for tensor in changed.graph.initializer:
        if tensor.name in names and tensor.data_type in FLOATS:
            tensor.CopyFrom(numpy_helper.from_array(in_last_digits(numpy_helper.to_array(tensor), rng), tensor.name))
    return changed


def _unrounded(model: ModelProto) -> ModelProto:
    """The model, whose kernels must not round what they multiply with quantized weights to integers."""
    if not any(node.op_type in ROUNDING for node in model.graph.node):
        return model
    model = copied(model)
    for node in model.graph.node:
        if node.op_type in ROUNDING:
            kept = [attribute for attribute in node.attribute if attribute.name != "accuracy_level"]
            del node.attribute[:]
            node.attribute.extend(kept)
    return model


def _computes_the_standard(case: Case) -> Found:
    """Whether a target's operators give the loss and the gradients that those of the standard give."""
    if not is_targeted(case.model):
        return NOTHING
    model = ModelProto()
    model.CopyFrom(case.described.model)
    to_standard(model)
    expected = Executor(model, fallback=False)(case.feeds)
    gradients = list(case.roles.gradients.values())  # not what an optimizer makes of them: it may amplify noise
    least = 1e-4 * max((np.max(np.abs(expected[name]), initial=0.0) for name in gradients), default=0.0)
    compared = [name for name in (case.roles.loss, *gradients) if finite(case.outputs[name])]
    worst = max((off(case.outputs[name], expected[name], least) for name in compared), default=0.0)
    return Found("passed" if worst <= TARGETED else "failed", f"largest relative difference {worst:.1e}")


def _is_finite(case: Case) -> Found:
    """Whether the loss and every gradient are finite; of data on which the loss is not, nothing follows."""
    bad = [name for name, x in case.outputs.items() if not finite(x)]
    if case.roles.loss in bad:
        return Found(ends=True, leaves_unproved="its loss is not finite on these data: give others")
    if bad:
        return Found("failed", f"not finite: {', '.join(bad[:5])}", ends=True)
    return Found("passed", "loss and every gradient")


CHECKS: tuple[tuple[str, Callable[[Case], Found]], ...] = (
    ("onnx checker", _is_valid),
    ("size", _is_small),
    ("its Gradient node can be written out", _expands),
    ("loads in onnxruntime", _loads),
    ("runs", _runs),
    ("computes what the original computes", _computes_the_original),
    ("computes what the operators of the standard compute", _computes_the_standard),
    ("finite", _is_finite),
    ("gradients against differences of the loss", agrees_with_slopes),
)
"""Each check and the name of its step in the proof."""
