"""Prove a training model before anyone trusts it: it is valid, it loads, it still computes the original, and its
gradients agree with differences of its loss.

Differences are taken in float64 wherever an executor has the kernels, because float32 noise hides small faults.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, helper, numpy_helper

from onnxgrad_cli.check import Arrays, Difference, by_array, by_entry, directional
from onnxgrad_cli.emit import is_float
from onnxgrad_cli.executor import Executor, to_double
from onnxgrad_cli.files import load_external_data
from onnxgrad_cli.graph import HALVES, Graph, dtype_of, is_external, nbytes, shape_of
from onnxgrad_cli.passes.describe import Roles

LARGE = 64 << 20
"""Bytes of weights above which the proof is made only when asked for: it would take more than a few seconds."""

QUICK = 0.01
"""Seconds. A model whose step takes less on onnxruntime can be measured on onnx.reference, in float64."""

FAITHFUL = {4: 1e-4, 2: 2e-2}
"""How far the losses in float64 and in the model's own precision may be apart, by the bytes of its narrowest floats."""

Scale = Callable[[np.ndarray], np.ndarray | float]
DIRECTIONS = 3
TOLERANCE = {"double": 1e-4, "single": 5e-2}
SEQUENCE_SIZES = (8, 16, 32, 64, 224)


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
    if weight_bytes > LARGE and not force:
        proof.status = "skipped"
        proof.reason = f"{weight_bytes / 1e6:,.0f} MB of weights: ask for it with --verify"
        return proof
    model = with_weights(model, path)
    subject = Subject(model, roles)
    rng = np.random.default_rng(seed)
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
            feeds, outputs, drawn = _first_run(run, subject, rng, data or {}, sizes or {})
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
    bad = [name for name, x in outputs.items() if not _finite(x)]
    if roles.loss in bad:
        proof.status, proof.reason = "skipped", "the loss of random data is not finite: give data of its own"
        return proof
    with proof.step("finite") as say:
        say(*(("failed", f"not finite: {', '.join(bad[:5])}") if bad else ("passed", "loss and every gradient")))
    if bad:
        return proof
    start = time.perf_counter()
    again = run(feeds)[roles.loss]
    seconds = time.perf_counter() - start
    with proof.step("gradients against differences of the loss") as say:
        if not np.array_equal(again, outputs[roles.loss]):
            say("skipped", "the model draws random numbers, so the losses of two runs differ")
            return proof
        status, detail, proof.executor = _compare_differences(subject, feeds, rng, budget, seconds, by_array)
        if status == "failed":
            # A right gradient can differ too: a row of an attention mask hides everything, so that adding -3e38 rounds
            # away what has a derivative; or a scale near zero makes a plateau, which any step leaves. Neither is met
            # again without masks and with steps in proportion; a wrong rule is.
            if drawn is not None:
                feeds = {**feeds, **random_feeds(subject, rng, drawn, masked=False), **(data or {})}
            status, detail, proof.executor = _compare_differences(subject, feeds, rng, budget, seconds, by_entry)
        say(status, detail)
    return proof


def _runs(original: ModelProto, subject: Subject, rng: np.random.Generator, sizes: Mapping[str, int]) -> bool:
    """Whether the original model runs on random data where its training model does not."""
    taken = {value.name for value in original.graph.input}
    run = Executor(original, fallback=False)
    for size in SEQUENCE_SIZES:
        feeds = random_feeds(subject, rng, {**_guess(subject, size), **sizes})
        try:
            run({name: x for name, x in feeds.items() if name in taken})
        except Exception:  # sizes that don't fit: try larger ones
            continue
        return True
    return False


@dataclass(frozen=True)
class Subject:
    """A training model with its weights, and what its inputs and outputs are for."""

    model: ModelProto
    roles: Roles


def with_weights(model: ModelProto, path: Path | None) -> ModelProto:
    """The model with its external data loaded, as a copy where there are any; else the model itself."""
    if not any(is_external(tensor) for tensor in model.graph.initializer):
        return model
    loaded = ModelProto()
    loaded.CopyFrom(model)
    load_external_data(loaded, path)
    return loaded


def _first_run(
    run: Executor, subject: Subject, rng: np.random.Generator, data: Mapping[str, np.ndarray], sizes: Mapping[str, int]
) -> tuple[Arrays, Arrays, dict[str, int] | None]:
    """Feeds that the model accepts, its outputs for them, and the sizes if any feed was drawn at random.

    Small sizes come first, and data above zero after others.
    """
    failure: Exception | None = None
    for size in SEQUENCE_SIZES:
        for positive in (False, True):
            guess = {**_guess(subject, size), **sizes}
            feeds = random_feeds(subject, rng, guess, positive)
            drawn = guess if any(name not in data for name in feeds) else None
            feeds.update({name: x for name, x in data.items() if name in feeds or name in subject.roles.gradients})
            try:
                outputs = run(feeds)
            except Exception as error:  # sizes that don't fit: try larger ones
                failure = failure or error
                break
            if positive or _finite(outputs[subject.roles.loss]):
                return feeds, outputs, drawn
    assert failure is not None
    raise failure


def _finite(x: np.ndarray) -> bool:
    return x.dtype.kind in "iub" or bool(np.isfinite(np.asarray(x, np.float64)).all())


def _guess(subject: Subject, size: int) -> dict[str, int]:
    """A size for every symbol of the inputs: 2 for what leads an input, `size` for the rest."""
    guess: dict[str, int] = {}
    types = {value.name: value.type for value in subject.model.graph.input}
    for name in subject.roles.fed:
        for axis, dim in enumerate(shape_of(types[name]) or ()):
            if isinstance(dim, str):
                guess.setdefault(dim, 2 if axis == 0 else size)
    return guess


def random_feeds(
    subject: Subject, rng: np.random.Generator, sizes: Mapping[str, int], positive: bool = False, masked: bool = True
) -> Arrays:
    """Random arrays for the inputs that must be fed.

    Floats are normal, or between 0 and 1 if `positive`. Integers are valid as what they index; those that index
    no weight are 0 or 1 if `masked`, else 1.
    """
    types = {value.name: value.type for value in subject.model.graph.input}
    limits = {**_index_limits(subject.model), **{t.label: t.classes for t in subject.roles.losses if t.classes}}
    feeds = {}
    for name in subject.roles.fed:
        shape = [sizes.get(dim, 2) if isinstance(dim, str) else dim for dim in shape_of(types[name]) or ()]
        array: np.ndarray
        if not is_float(types[name]):
            array = rng.integers(0 if masked or name in limits else 1, limits.get(name, 2), shape)
        elif subject.roles.inputs[name] == "model input" and not positive:
            array = rng.standard_normal(shape)
        else:  # labels and sample weights: every loss is defined between 0 and 1
            array = rng.uniform(0.05, 0.95, shape)
        feeds[name] = np.asarray(array).astype(helper.tensor_dtype_to_np_dtype(dtype_of(types[name])))
    return feeds


def _index_limits(model: ModelProto) -> dict[str, int]:
    """For inputs that index a weight: how many rows it has."""
    dims = {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}
    limits: dict[str, int] = {}
    for node in model.graph.node:
        if node.op_type in ("Gather", "GatherElements") and node.input[0] in dims:
            axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
            rows = dims[node.input[0]][axis]
            limits[node.input[1]] = min(limits.get(node.input[1], rows), rows)
    return limits


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
        expected = Executor(original, fallback=False)(fed)
        got = Executor(_part(probe), fallback=False)(feeds)
        worst = max(_relative(got[name], expected[name]) for name in names)
        half = any(got[name].dtype.itemsize < 4 for name in names)
        say("passed" if worst <= (2e-2 if half else 1e-4) else "failed", f"largest relative difference {worst:.1e}")


def _relative(a: np.ndarray, b: np.ndarray) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.max(np.abs(a - b), initial=0.0) / max(np.max(np.abs(b), initial=0.0), 1e-30))


def _compare_differences(
    subject: Subject,
    feeds: Mapping[str, np.ndarray],
    rng: np.random.Generator,
    budget: float,
    seconds: float,
    scale: Scale,
) -> tuple[str, str, str]:
    """Status, detail and executor of the comparison: along all gradients together, then along each alone.

    Alone counts in float64 only: a small gradient drowns in the loss's float32 noise.
    """
    measure = _measure(subject, feeds, seconds <= QUICK, scale)
    names = list(subject.roles.gradients)
    worst = measure.error(rng, names)
    detail = f"{DIRECTIONS} random directions: relative error {worst:.1e} ({measure.name})"
    single: dict[str, float] = {}
    end = time.perf_counter() + budget
    if len(names) > 1 and (measure.double or worst > measure.tolerance):
        for name in names:
            if time.perf_counter() > end:
                break
            single[name] = measure.error(rng, [name])
        detail += f"; {len(single)} of {len(names)} tensors also alone: up to {max(single.values()):.1e}"
    wrong = [f"{name} ({error:.1e})" for name, error in single.items() if error > measure.tolerance]
    if wrong:
        detail += f"; wrong: {', '.join(wrong[:10])}"
    if worst <= measure.tolerance and not (measure.double and wrong):
        return "passed", detail, measure.name
    if not measure.steady(rng):
        return "skipped", "the gradients are rounding noise here: a change by a millionth gives others", measure.name
    return "failed", detail, measure.name


class _Measure:
    """Differences of the loss on one executor: gradients, and the loss as a function of weights and inputs."""

    def __init__(
        self, subject: Subject, feeds: Mapping[str, np.ndarray], scale: Scale, double: bool, prefer: str
    ) -> None:
        model = to_double(subject.model) if double else subject.model
        run = Executor(model, prefer, fallback=False)
        self._run = Executor(_part(model, subject.roles.loss), prefer, fallback=False)
        stored = {tensor.name: tensor for tensor in model.graph.initializer}
        types = {value.name: value.type for value in model.graph.input}
        point = {
            name: np.asarray(x, helper.tensor_dtype_to_np_dtype(dtype_of(types[name]))) for name, x in feeds.items()
        }
        gradients = subject.roles.gradients
        point.update({name: numpy_helper.to_array(stored[name]) for name in gradients if name not in point})
        outputs = run(point)
        self._whole = run
        self._point = point
        self._outputs = gradients
        self._gradients = {name: outputs[out] for name, out in gradients.items()}
        self._output = subject.roles.loss
        self.value = abs(float(outputs[self._output]))
        self.double = double
        self._scale = scale
        self.tolerance = TOLERANCE["double" if double else "single"]
        self.name = f"{run.name} in {'float64' if double else 'float32'}"

    def _loss(self, point: Arrays) -> float:
        return float(self._run(point)[self._output])

    def error(self, rng: np.random.Generator, names: list[str]) -> float:
        """The relative error of the claimed gradients of `names`: the median over some directions.

        A wrong gradient is wrong in every direction, while a kink between the two ends spoils only one.
        """
        return float(np.median([self._direction(rng, names).error for _ in range(DIRECTIONS)]))

    def steady(self, rng: np.random.Generator) -> bool:
        """Whether the gradients stay much the same where everything is moved by a millionth of its size.

        Where they don't, they are what rounding left of sums that cancel, and no difference can confirm them.
        """
        moved = {
            name: np.asarray(x * (1 + 1e-6 * rng.standard_normal(x.shape)), x.dtype) if x.dtype.kind == "f" else x
            for name, x in self._point.items()
        }
        outputs = self._whole(moved)
        change = sum(
            float(np.sum(np.square(np.float64(outputs[out]) - self._gradients[name])))
            for name, out in self._outputs.items()
        )
        size = sum(float(np.sum(np.square(gradient, dtype=np.float64))) for gradient in self._gradients.values())
        return change <= 0.25 * size

    def _direction(self, rng: np.random.Generator, names: list[str]) -> Difference:
        gradients = {name: self._gradients[name] for name in names}
        if self.double:
            floor = 1e-4 * self.value + 1e-12
            return directional(self._loss, self._point, gradients, rng, 1e-6, floor, self._scale)
        return _steadiest(self._loss, self._point, gradients, rng, self.value, self._scale)


def _steadiest(
    function: Callable[[Arrays], float],
    point: Mapping[str, np.ndarray],
    gradients: Mapping[str, np.ndarray],
    rng: np.random.Generator,
    value: float,
    scale: Scale,
) -> Difference:
    """In float32 no one step suits all: of several, the one whose measure agrees best with its neighbour's.

    The choice looks at the measures only, never at the claim. What the neighbours disagree by is the noise.
    """
    state = rng.bit_generator.state
    found = []
    for step in (1e-1, 3e-2, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4):
        rng.bit_generator.state = state
        found.append(directional(function, point, gradients, rng, step, scale=scale))
    gaps = [abs(a.measured - b.measured) for a, b in pairwise(found)]
    best = int(np.argmin(gaps))
    chosen = found[best + 1]
    size = max(abs(chosen.claimed), abs(chosen.measured), 1e-3 * value, 1e-30)
    error = max(0.0, abs(chosen.claimed - chosen.measured) - 2 * gaps[best]) / size
    return Difference(chosen.claimed, chosen.measured, error)


def _measure(subject: Subject, feeds: Mapping[str, np.ndarray], quick: bool, scale: Scale) -> _Measure:
    """The most exact measure there is: float64 on onnxruntime, or for a quick model on onnx.reference.

    One whose loss is not that of the model itself computes something else, and is passed over.
    """
    plain = _Measure(subject, feeds, scale, False, "onnxruntime")
    for prefer in ("onnxruntime", "reference")[: 1 + quick]:
        try:
            exact = _Measure(subject, feeds, scale, True, prefer)
        except Exception:  # one of the operators has no double kernel there
            continue
        if abs(exact.value - plain.value) <= FAITHFUL[_width(subject.model)] * max(plain.value, 1e-6):
            return exact
    return plain


def _width(model: ModelProto) -> int:
    """2 where a weight or an input has 16 bits, else 4."""
    types = [*(tensor.data_type for tensor in model.graph.initializer), *(dtype_of(v.type) for v in model.graph.input)]
    return 2 if any(dtype in HALVES for dtype in types) else 4


def _part(model: ModelProto, output: str | None = None) -> ModelProto:
    """The part of a model that computes one output (None: its outputs)."""
    part = ModelProto()
    part.CopyFrom(model)
    kept = [value for value in part.graph.output if output in (None, value.name)]
    del part.graph.output[:]
    part.graph.output.extend(kept)
    graph = Graph(part)
    graph.remove_unused()
    return graph.commit()
