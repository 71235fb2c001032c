"""Check that the gradients are also correct at batch sizes other than the one in the proof.

If the samples of a batch are independent, the loss is a mean or a sum over them. A batch that is repeated several times
then gives the same loss and gradients for a mean, and a multiple of them for a sum.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.execution.double import DoubleExecutor
from onnxgrad_cli.execution.kernels import in_short
from onnxgrad_cli.execution.limits import OverLimit
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.modes import RANDOM
from onnxgrad_cli.ir.node_values import with_bodies
from onnxgrad_cli.ir.sample_places import SampleAxis, Tracker
from onnxgrad_cli.ir.type_inference import infer_types
from onnxgrad_cli.ir.types import Arrays, shape_of
from onnxgrad_cli.losses.registry import LOSSES
from onnxgrad_cli.metadata import Term
from onnxgrad_cli.verification.case import NOTHING, CheckOutcome, ProofCase, skipped
from onnxgrad_cli.verification.feeds import part, run_on_own
from onnxgrad_cli.verification.gradients.judgement import off
from onnxgrad_cli.verification.gradients.loss_function import narrowest

TRAINED = 32
"""The default batch size of `onnxgrad train`."""

MAX_SECONDS = {False: 0.5, True: 5.0}
"""Largest processor time, in seconds, of a run on `TRAINED` samples. The key is True if the user requested the proof.

The time is estimated from a run on one sample. If the estimate is larger, a batch of `TRAINED` samples is not checked.
"""

TOLERANCE = {4: 1e-3, 2: 5e-2}
"""Bytes of the model's narrowest float -> largest accepted difference of gradients, relative to the largest entry."""

EXACT = 1e-6
"""Largest accepted difference of gradients in float64, relative to the largest entry."""

OUTPUTS = 1e-2
"""Largest accepted relative difference of outputs from those of the original model, for a batch of one sample."""

ONLY_ONE_SAMPLE = "a batch of one sample runs; other sizes can't be compared, because"

SMALL_GRADIENT_SHARE = 1e-2
"""Differences of gradients are divided by the largest entry, or by this fraction of the largest gradient if larger."""


def agrees_across_batches(case: ProofCase) -> CheckOutcome:
    """Check the gradients at other batch sizes than the one in the proof: at 1, and at about `TRAINED`.

    The first sample is compared with a batch of its copies. The batch of the proof is compared with a batch of about
    `TRAINED` samples, which repeats it, unless this would take too long.
    """
    if case.is_large or (case.is_long and not case.force):
        return NOTHING
    if any(node.op_type in RANDOM for node in with_bodies(case.described.model.graph.node)):
        return NOTHING
    try:
        forward = _forward(case)
    except OnnxgradError:  # another tool may have changed the model
        return NOTHING
    batch = _batch(case, forward)
    axes = _axes(case, forward, batch) if batch else None
    if not batch or not axes:
        return NOTHING
    tiles = _Tiles(case, axes, forward)
    start = time.process_time()
    alone = tiles.run(tiles.first)
    seconds = time.process_time() - start
    if isinstance(alone, CheckOutcome):
        return alone
    if tiles.difference_of_outputs(alone) > OUTPUTS:
        return tiles.skipped("the original has other outputs for a batch of one sample", 1)
    if not _is_plain(case):
        return CheckOutcome("passed", f"{ONLY_ONE_SAMPLE} the loss may not be a mean or a sum over samples")
    trained = TRAINED * seconds <= MAX_SECONDS[case.force]
    return tiles.compare(alone, trained, partial(_is_independent, case, forward, axes, batch))


def _batch(case: ProofCase, forward: Graph) -> str | None:
    """Return the batch symbol: the first axis of the first model input that has axes. None if its size is fixed."""
    inputs = (name for name in case.roles.sampled if case.roles.inputs[name] == "model input")
    shapes = (shape_of(forward.types.get(name)) for name in inputs)
    first = next((shape[0] for shape in shapes if shape), None)
    return first if isinstance(first, str) and first != "?" else None


def _forward(case: ProofCase) -> Graph:
    """Return, with inferred types, the part of the training model that computes the outputs that the losses read."""
    made = {name for node in case.described.model.graph.node for name in node.output}
    judged = sorted({name for term in _terms(case) for name in (term.chunks or (term.output,))} & made)
    graph = Graph(part(case.described.model, judged))
    infer_types(graph)
    return graph


def _terms(case: ProofCase) -> list[Term]:
    """Return the losses on the first data set, whose batch changes. The batches of the other sets stay the same."""
    return [term for term in case.roles.losses if term.data == case.roles.losses[0].data]


def _axes(case: ProofCase, forward: Graph, batch: str) -> dict[str, int] | None:
    """Return a map from input to the axis of its samples; None if the axis of an input is unknown."""
    types = case.described.types | forward.types
    axes: dict[str, int] = {}
    for name in case.roles.sampled:
        shape = shape_of(types.get(name)) or ()
        if shape.count(batch) > 1:
            return None
        if batch in shape:
            axes[name] = shape.index(batch)
    size = next((case.feeds[name].shape[axis] for name, axis in axes.items()), 0)
    if not size:
        return None
    for term in _terms(case):  # the sizes of a label may have other symbols
        if term.label in case.roles.sampled and term.label not in axes:
            label, output = np.shape(case.feeds[term.label]), shape_of(forward.types.get(term.output)) or ()
            if label[:1] != (size,) or (output[:1] != (batch,) and not _leads(case, axes, term.output)):
                return None
            axes[term.label] = 0
    return axes


def _leads(case: ProofCase, axes: Mapping[str, int], output: str) -> bool:
    """Return True if runs with 1 and 3 samples show that axis 0 of an output is the sample axis.

    With a single sample, the output may lack the axis.
    """
    if case.original is None:
        return False
    sizes: list[int] = []
    for count in (1, 3):
        feeds = {n: np.take(x, [0] * count, axes[n]) if n in axes else x for n, x in case.feeds.items()}
        outputs = _outputs(case.original, feeds)
        if outputs is None or output not in outputs:
            return False
        shape = np.shape(outputs[output])
        sizes.append(shape[0] if shape else 1)
    return sizes == [1, 3]


def _is_plain(case: ProofCase) -> bool:
    """Return True if the model has no optimizer and its loss is a mean or a sum of onnxgrad's own losses."""
    ours = {loss.name for loss in LOSSES if loss.function.__module__.startswith("onnxgrad_cli.")}
    return not case.roles.optimizer and ours.issuperset(term.name for term in case.roles.losses)


def _is_independent(case: ProofCase, forward: Graph, axes: Mapping[str, int], batch: str) -> bool:
    """Return True if the graph proves that the outputs of a sample don't depend on the other samples of the batch."""
    starts = {name: [SampleAxis(axis)] for name, axis in axes.items() if case.roles.inputs[name] == "model input"}
    tracker = Tracker(forward, batch, starts, frees=False)
    tracker.run(forward.output_names, "")
    return not tracker.refusals and all(name in tracker.places for name in forward.output_names)


class _Tiles:
    """Runs the model on batches made of copies of the case's samples.

    Args:
        case: the case, with the inputs that the proof uses.
        axes: input -> the axis of its samples.
        forward: the part of the model that computes the outputs that the losses read.
    """

    def __init__(self, case: ProofCase, axes: Mapping[str, int], forward: Graph) -> None:
        self._case, self._axes = case, axes
        self._judged = case.original or partial(run_on_own, forward.commit())
        self.first = {name: np.take(x, [0], axes[name]) if name in axes else x for name, x in case.feeds.items()}
        self._size = next(case.feeds[name].shape[axis] for name, axis in axes.items())

    def run(self, feeds: Arrays) -> Arrays | CheckOutcome:
        """Return the outputs for these feeds, or an outcome if the model does not run."""
        case = self._case
        try:
            return case.run(feeds)
        except (OverLimit, MemoryError):
            raise
        except Exception as error:  # onnxruntime's exceptions share no base class
            if case.original is None or _outputs(case.original, feeds) is None:
                return NOTHING
            size = next(feeds[name].shape[axis] for name, axis in self._axes.items())
            return self.skipped(f"the original runs on a batch of {size}, but the training model does not", size, error)

    def skipped(self, why: str, size: int, error: Exception | None = None) -> CheckOutcome:
        """Return the outcome for a batch size that the model does not support."""
        symbol = next(iter(self._case.symbols), "SYMBOL")
        why += f": {in_short(error)}" if error else ""
        return skipped(f"{why}; set the size with --dim {symbol}={size}, or avoid such batches")

    def difference_of_outputs(self, outputs: Arrays) -> float:
        """Return the largest relative difference between the outputs for the first sample and the original's.

        The original's outputs may lack the sample axis. If the case feeds other weights than the stored ones, the
        outputs can't be compared, and the difference is 0.
        """
        case = self._case
        if case.original is None or any(name in case.feeds for name in case.roles.gradients if self._is_weight(name)):
            return 0.0
        expected = _outputs(case.original, self.first) or {}
        both = [name for name, x in outputs.items() if isinstance(x, np.ndarray) and name in expected]
        least = {name: SMALL_GRADIENT_SHARE * _largest(case.outputs[name]) for name in both}
        pairs = [(outputs[name].ravel(), expected[name].ravel(), least[name]) for name in both]
        return max((_apart(*pair) for pair in pairs), default=0.0)

    def compare(self, alone: Arrays, trained: bool, independent: Callable[[], bool]) -> CheckOutcome:
        """Compare the first sample with copies of it and, if `trained`, the batch of the proof with copies of it.

        Args:
            alone: the outputs for the first sample.
            trained: also compare with a batch of about `TRAINED` samples.
            independent: `_is_independent`, called only if gradients differ. True fails the check, False skips it.
                Gradients are compared only if the outputs for a repeated batch are the repeated outputs. This is not
                always so, because an output may depend on the batch size, such as a gradient inside the model that is
                divided by it.
        """
        case = self._case
        batches = [(self.first, alone, max(self._size, 3))]
        batches += [(case.feeds, case.outputs, max(TRAINED // self._size, 2))] if trained else []
        worst, sizes = 0.0, list[int]()
        for feeds, once, count in batches:
            many = self.run(self._tiled(feeds, count))
            if isinstance(many, CheckOutcome):
                return many
            if not self._are_copies(feeds, count):
                return CheckOutcome("passed", f"{ONLY_ONE_SAMPLE} the samples may not be independent")
            worst = max(worst, self._difference(case.run, feeds, once, many, count))
            sizes.append(1 if feeds is self.first else count * self._size)
        said, exact = f"batches of {' and '.join(map(str, sizes))}", ""
        if worst > TOLERANCE[narrowest(case.described.model)]:
            try:
                run = DoubleExecutor(case.described.model).on
                exact_runs = ((feeds, run(feeds), run(self._tiled(feeds, count)), count) for feeds, _, count in batches)
                worst = max(self._difference(run, *each) for each in exact_runs)
            except (OverLimit, MemoryError):
                raise
            except Exception:  # the executors' exceptions share no base class
                return skipped(f"{said} give different gradients: relative difference {worst:.1e}")
            exact = " in float64"
            if worst > EXACT:
                text = f"{said} do not give the gradients of their samples: relative difference {worst:.1e}"
                return CheckOutcome("failed" if independent() else "skipped", text + exact)
        return CheckOutcome("passed", f"{said}: largest relative difference {worst:.1e}{exact}")

    def _are_copies(self, feeds: Arrays, count: int) -> bool:
        """Return True if the outputs for a batch repeated `count` times are the outputs for the batch, repeated."""
        once, many = _outputs(self._judged, feeds), _outputs(self._judged, self._tiled(feeds, count))
        if once is None or many is None:
            return False
        pairs = [(x, many[name]) for name, x in once.items()]
        if not all(isinstance(x, np.ndarray) and isinstance(y, np.ndarray) and x.ndim == y.ndim for x, y in pairs):
            return False
        longer = [[axis for axis in range(x.ndim) if y.shape[axis] == count * x.shape[axis]] for x, y in pairs]
        copies = [
            (np.concatenate([x] * count, at[0]) if at else x, y) for (x, y), at in zip(pairs, longer, strict=True)
        ]
        return all(x.shape == y.shape and off(y, x) <= OUTPUTS for x, y in copies)

    def _difference(
        self, run: Callable[[Arrays], Arrays], feeds: Arrays, once: Arrays, many: Arrays, count: int
    ) -> float:
        """Return the largest relative difference of loss and gradients from those expected from the original batch.

        `once` are the outputs for the batch, and `many` those for `count` copies of it. If the loss is a sum, a part of
        it may not depend on the batch, such as a penalty. A run on two copies of the batch determines that part.
        """
        expected, found = self._results(once), self._results(many)
        if self._case.roles.reduction == "sum":
            twice = self._results(run(self._tiled(feeds, 2)))
            expected = {name: x + (count - 1) * (twice[name] - x) for name, x in expected.items()}
        largest = max(map(_largest, expected.values()), default=0.0)
        return max(
            (_apart(found[name], x, SMALL_GRADIENT_SHARE * largest) for name, x in expected.items()), default=0.0
        )

    def _results(self, outputs: Arrays) -> Arrays:
        """Return the loss and the gradients of weights, in float64."""
        roles = self._case.roles
        names = [roles.loss, *(output for name, output in roles.gradients.items() if self._is_weight(name))]
        return {name: np.asarray(outputs[name], np.float64) for name in names if name in outputs}

    def _is_weight(self, name: str) -> bool:
        return self._case.roles.inputs.get(name) == "weight"

    def _tiled(self, feeds: Arrays, count: int) -> Arrays:
        """Return feeds in which the samples are repeated `count` times."""
        axes = self._axes
        return {n: np.concatenate([x] * count, axes[n]) if n in axes else x for n, x in feeds.items()}


def _outputs(run: Callable[[Arrays], Arrays], feeds: Arrays) -> Arrays | None:
    """Return the outputs of a run; None if the model does not run."""
    try:
        return run(feeds)
    except (OverLimit, MemoryError):
        raise
    except Exception:  # the executors' exceptions share no base class
        return None


def _apart(found: np.ndarray, expected: np.ndarray, least: float) -> float:
    return off(found, expected, least) if found.shape == expected.shape else np.inf


def _largest(x: np.ndarray) -> float:
    return float(np.max(np.abs(x), initial=0.0)) if x.dtype.kind in "iuf" else 0.0
