"""The checks of a proof, in order: each is a function of the case, and leaves in the case what later ones need."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, helper

from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.files import load_external_data
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.skeleton import copied
from onnxgrad_cli.ir.types import Arrays, is_external, nbytes
from onnxgrad_cli.metadata import Roles, started
from onnxgrad_cli.standard.gradient_operator import expand_gradients, has_gradients
from onnxgrad_cli.targets.standard import is_targeted, to_standard
from onnxgrad_cli.verification.differences import by_array, by_entry
from onnxgrad_cli.verification.feeds import DescribedModel, factors_off_zero, finite, first_run, random_feeds
from onnxgrad_cli.verification.measure import DIRECTIONS, QUICK, Measure, Scale, measure, part

TARGETED = 1e-2
"""How far the operators of a target may be from the standard's, in float32, relative to a result's largest entry."""

LARGE, LONG = 64 << 20, 20_000
"""Bytes of weights and nodes above which the proof is made only when asked for: it takes more than seconds."""


@dataclass
class Case:
    """What a proof is about, and what its checks have made of it so far.

    Attributes:
        model, roles, path, original, data, sizes, force, budget: see `prove`.
        rng: draws the random data and directions.
        described: the training model with its weights, as it is run.
        run: runs that model on onnxruntime.
        feeds, outputs: what the model was run on, and what came of it.
        drawn: the sizes of symbolic dimensions; None where no feed was drawn at random.
        measured_by: what evaluated the differences, and in which precision.
    """

    model: ModelProto
    roles: Roles
    path: Path | None
    original: ModelProto | None
    data: Arrays
    sizes: Mapping[str, int]
    rng: np.random.Generator
    force: bool
    budget: float
    described: DescribedModel = field(init=False)
    run: Executor = field(init=False)
    feeds: Arrays = field(init=False)
    outputs: Arrays = field(init=False)
    drawn: dict[str, int] | None = field(init=False)
    measured_by: str = ""


@dataclass(frozen=True)
class Found:
    """What came of a check.

    Attributes:
        status: 'passed', 'failed' or 'skipped'; "" where there was nothing to check.
        detail: the finding, in words.
        ends: whether the checks that follow make no sense.
        leaves_unproved: why the model as a whole counts as not proved; "" where it does not.
    """

    status: str = ""
    detail: str = ""
    ends: bool = False
    leaves_unproved: str = ""


NOTHING = Found()


def _is_valid(case: Case) -> Found:
    """Whether onnx's checker takes the model."""
    try:
        onnx.checker.check_model(Graph(case.model, case.path).skeleton(), full_check=True)
        return Found("passed", "full check")
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        return Found("failed", str(error).strip(), ends=True)


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
        return Found("failed", str(error).strip()[:500], ends=True)


def _with_weights(model: ModelProto, path: Path | None) -> ModelProto:
    """The model with its external data loaded, as a copy where there are any; else the model itself."""
    if not any(is_external(tensor) for tensor in model.graph.initializer):
        return model
    loaded = copied(model)
    load_external_data(loaded, path)
    return loaded


def _runs(case: Case) -> Found:
    """Whether the model runs on the data given, or on random data of some size."""
    try:
        case.feeds, case.outputs, case.drawn = first_run(case.run, case.described, case.rng, case.data, case.sizes)
        return Found("passed", ", ".join(f"{name} {list(x.shape)}" for name, x in case.feeds.items()))
    except Exception as error:
        if case.original is None or _original_runs(case, case.original):
            return Found("failed", str(error).strip()[:500], ends=True)
        return Found(
            "skipped",
            "the original does not run on random data either: give data of its own",
            ends=True,
            leaves_unproved="the model does not run on random data",
        )


def _original_runs(case: Case, original: ModelProto) -> bool:
    """Whether the original model runs on random data where its training model does not."""
    taken = {value.name for value in original.graph.input}
    run = Executor(original, fallback=False)
    try:
        first_run(
            lambda feeds: run({name: x for name, x in feeds.items() if name in taken}),
            case.described, case.rng, {}, case.sizes,
        )  # fmt: skip
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
    taken = {value.name for value in original.graph.input}
    try:  # the training model may run where its original does not
        before = Executor(original)
        expected = before({name: x for name, x in case.feeds.items() if name in taken})
    except Exception as error:  # the executors' exceptions share no base class
        return Found("skipped", f"the original does not run: {str(error).strip()[:500]}")
    inputs = {name: x for name, x in case.feeds.items() if name in case.roles.fed}  # and the weights as stored
    got = Executor(part(probe), fallback=False)(inputs)
    worst = max(_off(got[name], expected[name]) for name in names)
    half = any(got[name].dtype.itemsize < 4 for name in names)
    status = "passed" if worst <= (2e-2 if half else 1e-4) else "failed"
    return Found(status, f"largest relative difference {worst:.1e} ({before.name})")


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
    worst = max((_off(case.outputs[name], expected[name], least) for name in compared), default=0.0)
    return Found("passed" if worst <= TARGETED else "failed", f"largest relative difference {worst:.1e}")


def _off(a: np.ndarray, b: np.ndarray, least: float = 0.0) -> float:
    """How far two results are apart, relative to the larger of the largest entry and `least`."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.max(np.abs(a - b), initial=0.0) / max(np.max(np.abs(b), initial=0.0), least, 1e-30))


def _is_finite(case: Case) -> Found:
    """Whether the loss and every gradient are finite; of data on which the loss is not, nothing follows."""
    bad = [name for name, x in case.outputs.items() if not finite(x)]
    if case.roles.loss in bad:
        return Found(ends=True, leaves_unproved="its loss is not finite on these data: give others")
    if bad:
        return Found("failed", f"not finite: {', '.join(bad[:5])}", ends=True)
    return Found("passed", "loss and every gradient")


def _agrees_with_differences(case: Case) -> Found:
    """Whether the gradients are what differences of the loss say."""
    start = time.perf_counter()
    again = case.run(case.feeds)[case.roles.loss]
    quick = time.perf_counter() - start <= QUICK
    if case.roles.estimated:
        return Found(
            "skipped", "they are straight-through estimates: the derivative of rounding is zero or does not exist"
        )
    if not np.array_equal(again, case.outputs[case.roles.loss]):
        return Found("skipped", "the model draws random numbers, so the losses of two runs differ")
    found = _compare_differences(case, quick, by_array)
    if found.status == "failed":
        # A right gradient can differ too: a row of an attention mask hides everything, so that adding -3e38 rounds
        # away what has a derivative; or a scale near zero makes a plateau, which any step leaves. Neither is met
        # again without masks and with steps in proportion; a wrong rule is.
        if case.drawn is not None:
            drawn = random_feeds(case.described, case.rng, case.drawn, masked=False)
            case.feeds = {**case.feeds, **drawn, **case.data}
        found = _compare_differences(case, quick, by_entry)
    return found


def _compare_differences(case: Case, quick: bool, scale: Scale) -> Found:
    """The comparison along all gradients together, then along each alone.

    Alone counts in float64 only: a small gradient drowns in the loss's float32 noise.
    """
    partial = case.roles.partial
    names = [name for name in case.roles.gradients if name not in partial]
    case.measured_by = ""
    if not names:
        return Found("skipped", "every gradient leaves out paths that are declared to be stopped")
    found = measure(case.described, case.run, case.feeds, quick, scale)
    case.measured_by = found.name
    worst = found.error(case.rng, names)
    detail = f"{DIRECTIONS} random directions: relative error {worst:.1e} ({found.name})"
    if partial:
        detail += f"; not of {', '.join(partial[:5])}{' and more' * (len(partial) > 5)}, of which paths are stopped"
    single = _errors_alone(case, found, names) if found.double or worst > found.tolerance else {}
    if single:
        detail += f"; {len(single)} of {len(names)} tensors also alone: up to {max(single.values()):.1e}"
    wrong = [f"{name} ({error:.1e})" for name, error in single.items() if error > found.tolerance]
    if wrong:
        detail += f"; wrong: {', '.join(wrong[:10])}"
    if worst <= found.tolerance and not (found.double and wrong):
        return Found("passed", detail)
    if not found.steady(case.rng):
        return Found("skipped", "the gradients are rounding noise here: a change by a millionth gives others")
    return Found("failed", detail)


def _errors_alone(case: Case, found: Measure, names: list[str]) -> dict[str, float]:
    """The error of each gradient alone, as many as there is time for; of a single one it is that of all."""
    end = time.perf_counter() + case.budget
    single: dict[str, float] = {}
    for name in names if len(names) > 1 else ():
        if time.perf_counter() > end:
            break
        single[name] = found.error(case.rng, [name])
    return single


CHECKS: tuple[tuple[str, Callable[[Case], Found]], ...] = (
    ("onnx checker", _is_valid),
    ("size", _is_small),
    ("its Gradient node can be written out", _expands),
    ("loads in onnxruntime", _loads),
    ("runs", _runs),
    ("computes what the original computes", _computes_the_original),
    ("computes what the operators of the standard compute", _computes_the_standard),
    ("finite", _is_finite),
    ("gradients against differences of the loss", _agrees_with_differences),
)
"""Each check and the name of its step in the proof."""
