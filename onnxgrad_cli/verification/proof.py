"""Prove a training model before anyone trusts it: it is valid, it loads, it still computes the original, and its
gradients agree with differences of its loss.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, helper

from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.files import load_external_data
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.types import is_external, nbytes
from onnxgrad_cli.metadata import Roles, started
from onnxgrad_cli.standard.gradient_operator import expand_gradients, has_gradients
from onnxgrad_cli.targets.standard import is_targeted, to_standard
from onnxgrad_cli.verification.differences import by_array, by_entry
from onnxgrad_cli.verification.feeds import Subject, factors_off_zero, finite, first_run, random_feeds
from onnxgrad_cli.verification.measure import DIRECTIONS, QUICK, Scale, measure, part

TARGETED = 1e-2
"""How far the operators of a target may be from the standard's, in float32, relative to a result's largest entry."""

LARGE, LONG = 64 << 20, 20_000
"""Bytes of weights and nodes above which the proof is made only when asked for: it takes more than seconds."""


@dataclass(frozen=True)
class Step:
    """One thing that was checked: `status` is 'passed', 'failed' or 'skipped'."""

    name: str
    status: str
    detail: str
    seconds: float


@dataclass
class Proof:
    """What was checked and what came of it.

    Attributes:
        status: 'passed', 'failed', or 'skipped' with the `reason`.
        steps: each check in order.
        executor: what evaluated the differences, and in which precision.
    """

    status: str = "passed"
    reason: str = ""
    steps: list[Step] = field(default_factory=list)
    executor: str = ""

    @contextmanager
    def step(self, name: str) -> Iterator[Callable[[str, str], None]]:
        """Time a check; the block calls what it gets with a status and a detail."""
        start = time.perf_counter()
        outcome = ["passed", ""]

        def say(status: str, detail: str) -> None:
            outcome[:] = [status, detail]

        try:
            yield say
        finally:
            self.steps.append(Step(name, outcome[0], outcome[1], time.perf_counter() - start))
            if outcome[0] == "failed":
                self.status = "failed"

    @property
    def failed(self) -> bool:
        """Whether a check failed."""
        return self.status == "failed"


def prove(
    model: ModelProto,
    roles: Roles,
    path: Path | None = None,
    original: ModelProto | None = None,
    data: Mapping[str, np.ndarray] | None = None,
    sizes: Mapping[str, int] | None = None,
    seed: int = 0,
    force: bool = False,
    budget: float = 3.0,
) -> Proof:
    """Check a training model on given or random data.

    Args:
        model: the training model; external data are relative to `path`.
        roles: what its inputs and outputs are for.
        original: the inference model it was made from, for the comparison of the forward parts.
        data: arrays for its inputs; what is missing is drawn at random.
        sizes: sizes of symbolic dimensions for random data.
        seed: of the random data and directions.
        force: check large models too, which takes longer than a few seconds.
        budget: seconds to spend on differences with respect to single weights.
    """
    proof = Proof()
    graph = Graph(model, path)
    weight_bytes = sum(nbytes(tensor) for tensor in graph.initializers.values())
    with proof.step("onnx checker") as say:
        try:
            onnx.checker.check_model(graph.skeleton(), full_check=True)
            say("passed", "full check")
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
            say("failed", str(error).strip())
            return proof
    large = f"{weight_bytes / 1e6:,.0f} MB of weights" if weight_bytes > LARGE else ""
    long = f"{len(model.graph.node):,} nodes" if len(model.graph.node) > LONG else ""
    if (large or long) and not force:
        proof.status = "skipped"
        proof.reason = f"{large or long}: ask for it with --verify"
        return proof
    if has_gradients(model):
        with proof.step("its Gradient node can be written out") as say:
            model = expand_gradients(deepcopy(model), path)
            say("passed", f"{len(model.graph.node):,} nodes in all")
    model = with_weights(started(model, roles), path)
    subject = Subject(model, roles)
    rng = np.random.default_rng(seed)
    data = {**factors_off_zero(subject, rng), **(data or {})}
    with proof.step("loads in onnxruntime") as say:
        try:
            run = Executor(model, fallback=False)
            say("passed", run.name)
        except Exception as error:  # onnxruntime's exceptions share no base class
            say("failed", str(error).strip()[:500])
            return proof
    before = with_weights(original, path) if original is not None else None
    with proof.step("runs") as say:
        try:
            feeds, outputs, drawn = first_run(run, subject, rng, data, sizes or {})
            say("passed", ", ".join(f"{name} {list(x.shape)}" for name, x in feeds.items()))
        except Exception as error:
            if before is None or _runs(before, subject, rng, sizes or {}):
                say("failed", str(error).strip()[:500])
                return proof
            say("skipped", "the original does not run on random data either: give data of its own")
            proof.status, proof.reason = "skipped", "the model does not run on random data"
            return proof
    if before is not None:
        _compare_forward(proof, subject, before, feeds)
    if is_targeted(model):
        _compare_standard(proof, subject, feeds, outputs)
    bad = [name for name, x in outputs.items() if not finite(x)]
    if roles.loss in bad:
        proof.status, proof.reason = "skipped", "its loss is not finite on these data: give others"
        return proof
    with proof.step("finite") as say:
        say(*(("failed", f"not finite: {', '.join(bad[:5])}") if bad else ("passed", "loss and every gradient")))
    if bad:
        return proof
    start = time.perf_counter()
    again = run(feeds)[roles.loss]
    seconds = time.perf_counter() - start
    with proof.step("gradients against differences of the loss") as say:
        if roles.estimated:
            say("skipped", "they are straight-through estimates: the derivative of rounding is zero or does not exist")
            return proof
        if not np.array_equal(again, outputs[roles.loss]):
            say("skipped", "the model draws random numbers, so the losses of two runs differ")
            return proof
        status, detail, proof.executor = _compare_differences(subject, run, feeds, rng, budget, seconds, by_array)
        if status == "failed":
            # A right gradient can differ too: a row of an attention mask hides everything, so that adding -3e38 rounds
            # away what has a derivative; or a scale near zero makes a plateau, which any step leaves. Neither is met
            # again without masks and with steps in proportion; a wrong rule is.
            if drawn is not None:
                feeds = {**feeds, **random_feeds(subject, rng, drawn, masked=False), **data}
            status, detail, proof.executor = _compare_differences(subject, run, feeds, rng, budget, seconds, by_entry)
        say(status, detail)
    return proof


def _runs(original: ModelProto, subject: Subject, rng: np.random.Generator, sizes: Mapping[str, int]) -> bool:
    """Whether the original model runs on random data where its training model does not."""
    taken = {value.name for value in original.graph.input}
    run = Executor(original, fallback=False)
    try:
        first_run(lambda feeds: run({name: x for name, x in feeds.items() if name in taken}), subject, rng, {}, sizes)
    except Exception:  # onnxruntime's exceptions share no base class
        return False
    return True


def with_weights(model: ModelProto, path: Path | None) -> ModelProto:
    """The model with its external data loaded, as a copy where there are any; else the model itself."""
    if not any(is_external(tensor) for tensor in model.graph.initializer):
        return model
    loaded = ModelProto()
    loaded.CopyFrom(model)
    load_external_data(loaded, path)
    return loaded


def _compare_forward(proof: Proof, subject: Subject, original: ModelProto, feeds: Mapping[str, np.ndarray]) -> None:
    with proof.step("computes what the original computes") as say:
        types = {value.name: value.type for value in original.graph.output}
        made = {name for node in subject.model.graph.node for name in node.output}
        names = [name for name in types if name in made]
        if not names:
            return say("skipped", "the loss judges a value that is no output of the original")
        probe = ModelProto()
        probe.CopyFrom(subject.model)
        del probe.graph.output[:]
        probe.graph.output.extend(helper.make_value_info(name, types[name]) for name in names)
        taken = {value.name for value in original.graph.input}
        fed = {name: x for name, x in feeds.items() if name in taken}
        try:  # the training model may run where its original does not
            before = Executor(original)
            expected = before(fed)
        except Exception as error:  # the executors' exceptions share no base class
            return say("skipped", f"the original does not run: {str(error).strip()[:500]}")
        inputs = {name: x for name, x in feeds.items() if name in subject.roles.fed}  # and the weights as stored
        got = Executor(part(probe), fallback=False)(inputs)
        worst = max(_relative(got[name], expected[name]) for name in names)
        half = any(got[name].dtype.itemsize < 4 for name in names)
        status = "passed" if worst <= (2e-2 if half else 1e-4) else "failed"
        say(status, f"largest relative difference {worst:.1e} ({before.name})")


def _compare_standard(
    proof: Proof, subject: Subject, feeds: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]
) -> None:
    with proof.step("computes what the operators of the standard compute") as say:
        model = ModelProto()
        model.CopyFrom(subject.model)
        to_standard(model)
        expected = Executor(model, fallback=False)(feeds)
        gradients = list(subject.roles.gradients.values())  # not what an optimizer makes of them: it may amplify noise
        least = 1e-4 * max((np.max(np.abs(expected[name]), initial=0.0) for name in gradients), default=0.0)
        compared = [name for name in (subject.roles.loss, *gradients) if finite(outputs[name])]
        worst = max((_off(outputs[name], expected[name], least) for name in compared), default=0.0)
        say("passed" if worst <= TARGETED else "failed", f"largest relative difference {worst:.1e}")


def _off(a: np.ndarray, b: np.ndarray, least: float) -> float:
    """How far two results are apart, relative to the larger of the largest entry and `least`."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.max(np.abs(a - b), initial=0.0) / max(np.max(np.abs(b), initial=0.0), least, 1e-30))


def _relative(a: np.ndarray, b: np.ndarray) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.max(np.abs(a - b), initial=0.0) / max(np.max(np.abs(b), initial=0.0), 1e-30))


def _compare_differences(
    subject: Subject,
    run: Executor,
    feeds: Mapping[str, np.ndarray],
    rng: np.random.Generator,
    budget: float,
    seconds: float,
    scale: Scale,
) -> tuple[str, str, str]:
    """Status, detail and executor of the comparison: along all gradients together, then along each alone.

    Alone counts in float64 only: a small gradient drowns in the loss's float32 noise.
    """
    partial = subject.roles.partial
    names = [name for name in subject.roles.gradients if name not in partial]
    if not names:
        return "skipped", "every gradient leaves out paths that are declared to be stopped", ""
    found = measure(subject, run, feeds, seconds <= QUICK, scale)
    worst = found.error(rng, names)
    detail = f"{DIRECTIONS} random directions: relative error {worst:.1e} ({found.name})"
    if partial:
        detail += f"; not of {', '.join(partial[:5])}{' and more' * (len(partial) > 5)}, of which paths are stopped"
    single: dict[str, float] = {}
    end = time.perf_counter() + budget
    if len(names) > 1 and (found.double or worst > found.tolerance):
        for name in names:
            if time.perf_counter() > end:
                break
            single[name] = found.error(rng, [name])
        detail += f"; {len(single)} of {len(names)} tensors also alone: up to {max(single.values()):.1e}"
    wrong = [f"{name} ({error:.1e})" for name, error in single.items() if error > found.tolerance]
    if wrong:
        detail += f"; wrong: {', '.join(wrong[:10])}"
    if worst <= found.tolerance and not (found.double and wrong):
        return "passed", detail, found.name
    if not found.steady(rng):
        return "skipped", "the gradients are rounding noise here: a change by a millionth gives others", found.name
    return "failed", detail, found.name
