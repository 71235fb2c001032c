"""Compare the results of batches of other sizes than the one at which the gradients are proved.

Where the samples of a batch are independent, a loss is a mean or a sum over them. Copies of one batch then give the
same loss and gradients as the batch alone if it is a mean, and results in proportion if it is a sum.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np
import onnx

from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.execution.double import DoubleExecutor
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.execution.limits import OverLimit
from onnxgrad_cli.execution.runtime_errors import in_short
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.inference import infer_types
from onnxgrad_cli.ir.nodes import with_bodies
from onnxgrad_cli.ir.randomness import RANDOM
from onnxgrad_cli.ir.sample_places import Place, Tracker
from onnxgrad_cli.ir.skeleton import copied
from onnxgrad_cli.ir.types import Arrays, shape_of
from onnxgrad_cli.losses.registry import LOSSES
from onnxgrad_cli.verification.case import NOTHING, Case, Found
from onnxgrad_cli.verification.feeds import part
from onnxgrad_cli.verification.judgement import off
from onnxgrad_cli.verification.loss_function import narrowest

TRAINED = 32
"""The batch size of a training by default."""

MAX_SECONDS = {False: 0.5, True: 5.0}
"""Processor time that the run of a batch of `TRAINED` samples may take, as estimated from that of one sample: unasked,
and where the proof is asked for."""

TOLERANCE = {4: 1e-3, 2: 5e-2}
"""Largest difference of gradients, relative to the largest entry, by the bytes of the model's narrowest floats."""

EXACT = 1e-6
"""The same in float64."""

OUTPUTS = 1e-2
"""Largest relative difference of outputs from those of the original, at a batch of one sample."""

SMALL = 1e-2
"""The share of the largest gradient to which smaller ones are compared."""


def agrees_across_batches(case: Case) -> Found:
    """Check batches of one sample and of `TRAINED` samples against the batch at which the gradients are proved."""
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
    if isinstance(alone, Found):
        return alone
    if tiles.difference_of_outputs(alone) > OUTPUTS:
        return tiles.skipped("the original has other outputs for a batch of one sample", 1)
    if not _is_plain(case):
        return Found("passed", "a batch of one sample runs; the loss may not be a mean or a sum over samples")
    trained = TRAINED * seconds <= MAX_SECONDS[case.force]
    return tiles.compare(alone, trained, _is_independent(case, forward, axes, batch))


def _batch(case: Case, forward: Graph) -> str | None:
    """Return the symbol of the batch: the first axis of the first input that has axes; None where its size is fixed."""
    inputs = (name for name in case.roles.sampled if case.roles.inputs[name] == "model input")
    shapes = (shape_of(forward.types.get(name)) for name in inputs)
    first = next((shape[0] for shape in shapes if shape), None)
    return first if isinstance(first, str) and first != "?" else None


def _forward(case: Case) -> Graph:
    """Return the typed part of the training model that computes the outputs of the losses."""
    forward = copied(case.described.model)
    made = {name for node in forward.graph.node for name in node.output}
    judged = sorted({name for term in case.roles.losses for name in (term.chunks or (term.output,))} & made)
    del forward.graph.output[:]
    forward.graph.output.extend(onnx.ValueInfoProto(name=name) for name in judged)
    graph = Graph(part(forward))
    infer_types(graph)
    return graph


def _axes(case: Case, forward: Graph, batch: str) -> dict[str, int] | None:
    """Return the axis of the samples of each input that has one; None where that is not known."""
    types = {value.name: value.type for value in case.described.model.graph.input} | forward.types
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
    for term in case.roles.losses:  # of a label the sizes may have names of their own
        if term.label in case.roles.sampled and term.label not in axes:
            label, output = np.shape(case.feeds[term.label]), shape_of(forward.types.get(term.output)) or ()
            if label[:1] != (size,) or (output[:1] != (batch,) and not _leads(case, axes, term.output)):
                return None
            axes[term.label] = 0
    return axes


def _leads(case: Case, axes: Mapping[str, int], output: str) -> bool:
    """Return True if the samples lie along the first axis of an output, or alone have no axis, as runs show."""
    if case.original is None:
        return False
    sizes: list[int] = []
    for count in (1, 3):
        feeds = {n: np.take(x, [0] * count, axes[n]) if n in axes else x for n, x in case.feeds.items()}
        try:
            shape = np.shape(case.original(feeds)[output])
        except (OverLimit, MemoryError):
            raise
        except Exception:  # onnxruntime's exceptions share no base class
            return False
        sizes.append(shape[0] if shape else 1)
    return sizes == [1, 3]


def _is_plain(case: Case) -> bool:
    """Return True if the loss is a mean or a sum of losses of this project, and gradients are as they come of it."""
    ours = {loss.name for loss in LOSSES if loss.function.__module__.startswith("onnxgrad_cli.")}
    return not case.roles.optimizer and ours.issuperset(term.name for term in case.roles.losses)


def _is_independent(case: Case, forward: Graph, axes: Mapping[str, int], batch: str) -> bool:
    """Return True if samples are proved to be independent."""
    starts = {name: [Place(axis)] for name, axis in axes.items() if case.roles.inputs[name] == "model input"}
    tracker = Tracker(forward, batch, starts, frees=False)
    tracker.run(forward.output_names, "")
    return not tracker.refusals and all(name in tracker.places for name in forward.output_names)


class _Tiles:
    """Runs of copies of samples.

    Args:
        case: the case, with the feeds that are proved.
        axes: the axis of the samples, by input.
        forward: the part of the model that computes the judged outputs.
    """

    def __init__(self, case: Case, axes: Mapping[str, int], forward: Graph) -> None:
        self._case, self._axes, self._forward = case, axes, forward
        self.first = {name: np.take(x, [0], axes[name]) if name in axes else x for name, x in case.feeds.items()}
        self._size = next(case.feeds[name].shape[axis] for name, axis in axes.items())

    def run(self, feeds: Arrays) -> Arrays | Found:
        """Return the outputs on feeds, or a finding if the model does not run."""
        try:
            return self._case.run(feeds)
        except (OverLimit, MemoryError):
            raise
        except Exception as error:  # onnxruntime's exceptions share no base class
            if self._original(feeds) is None:
                return NOTHING
            size = next(feeds[name].shape[axis] for name, axis in self._axes.items())
            return self.skipped(f"the original runs on a batch of {size}, and the training model does not", size, error)

    def skipped(self, why: str, size: int, error: Exception | None = None) -> Found:
        """Say that batches of a size are of no use."""
        symbol = next(iter(self._case.symbols), "SYMBOL")
        why += f": {in_short(error)}" if error else ""
        return Found("skipped", f"{why}; fix the size with --dim {symbol}={size}, or leave such batches out")

    def _original(self, feeds: Arrays) -> Arrays | None:
        """Return the outputs of the original; None if it is missing or does not run."""
        try:
            return self._case.original(feeds) if self._case.original is not None else None
        except (OverLimit, MemoryError):
            raise
        except Exception:  # onnxruntime's exceptions share no base class
            return None

    def _judged(self, feeds: Arrays) -> Arrays | None:
        """Return the outputs of the original, or the judged outputs without it; None if the model does not run."""
        if self._case.original is not None:
            return self._original(feeds)
        model = self._forward.commit()
        taken = {value.name for value in model.graph.input}
        try:
            return Executor(model)({name: x for name, x in feeds.items() if name in taken})
        except (OverLimit, MemoryError):
            raise
        except Exception:  # the executors' exceptions share no base class
            return None

    def difference_of_outputs(self, outputs: Arrays) -> float:
        """Return how far outputs for the first sample are from the original's, which may lack the axis of the samples.

        Where the proof has moved the weights, they can't be compared.
        """
        if any(name in self._case.feeds for name in self._case.roles.gradients if self._is_weight(name)):
            return 0.0
        expected = self._original(self.first) or {}
        both = [name for name, x in outputs.items() if isinstance(x, np.ndarray) and name in expected]
        least = {name: SMALL * _largest(self._case.outputs[name]) for name in both}
        pairs = [(outputs[name].ravel(), expected[name].ravel(), least[name]) for name in both]
        return max((_apart(*pair) for pair in pairs), default=0.0)

    def compare(self, alone: Arrays, trained: bool, independent: bool) -> Found:
        """Compare the first sample with copies of it, and if `trained`, the proved batch with copies of it.

        Args:
            alone: the outputs for the first sample.
            trained: compare with a batch of `TRAINED` samples.
            independent: samples are proved to be independent, up to the number of samples that a gradient in the model
                may divide by. So batches are compared only if the outputs that are judged show no difference.
        """
        case = self._case
        batches = [(self.first, alone, max(self._size, 3))]
        batches += [(case.feeds, case.outputs, max(TRAINED // self._size, 2))] if trained else []
        worst, sizes = 0.0, list[int]()
        for feeds, once, count in batches:
            many = self.run(self._tiled(feeds, count))
            if isinstance(many, Found):
                return many
            if not self._are_copies(feeds, count):
                return Found("passed", "a batch of one sample runs; the samples are not known to be independent")
            worst = max(worst, self._difference(case.run, feeds, once, many, count))
            sizes.append(1 if feeds is self.first else count * self._size)
        said, exact = f"batches of {' and '.join(map(str, sizes))}", ""
        if worst > TOLERANCE[narrowest(case.described.model)]:
            try:
                worst = max(self._difference_in_double(feeds, count) for feeds, _, count in batches)
            except (OverLimit, MemoryError):
                raise
            except Exception:  # the executors' exceptions share no base class
                return Found("skipped", f"{said} give other gradients: relative difference {worst:.1e}")
            exact = " in float64"
            if worst > EXACT:
                text = f"{said} give other gradients than their samples: relative difference {worst:.1e}"
                return Found("failed" if independent else "skipped", text + exact)
        return Found("passed", f"{said}: largest relative difference {worst:.1e}{exact}")

    def _are_copies(self, feeds: Arrays, count: int) -> bool:
        """Return True if the model's outputs for so many copies of a batch are copies of those for the batch."""
        once, many = self._judged(feeds), self._judged(self._tiled(feeds, count))
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

    def _difference_in_double(self, feeds: Arrays, count: int) -> float:
        """Return the difference of results in float64."""
        double = DoubleExecutor(self._case.described.model)

        def run(feeds: Arrays) -> Arrays:
            return double(double.widened(feeds))

        return self._difference(run, feeds, run(feeds), run(self._tiled(feeds, count)), count)

    def _difference(
        self, run: Callable[[Arrays], Arrays], feeds: Arrays, once: Arrays, many: Arrays, count: int
    ) -> float:
        """Return the difference between the results of copies of a batch and the results that the batch implies.

        A sum may have a part that does not depend on the batch, as a penalty. Two copies of the batch show that part.
        """
        expected, found = self._results(once), self._results(many)
        if self._case.roles.reduction == "sum":
            twice = self._results(run(self._tiled(feeds, 2)))
            expected = {name: x + (count - 1) * (twice[name] - x) for name, x in expected.items()}
        largest = max(map(_largest, expected.values()), default=0.0)
        return max((_apart(found[name], x, SMALL * largest) for name, x in expected.items()), default=0.0)

    def _results(self, outputs: Arrays) -> Arrays:
        """Return the loss and the gradients of weights, in float64."""
        roles = self._case.roles
        names = [roles.loss, *(output for name, output in roles.gradients.items() if self._is_weight(name))]
        return {name: np.asarray(outputs[name], np.float64) for name in names if name in outputs}

    def _is_weight(self, name: str) -> bool:
        return self._case.roles.inputs.get(name) == "weight"

    def _tiled(self, feeds: Arrays, count: int) -> Arrays:
        """Return feeds with so many copies of their samples, one after the other."""
        axes = self._axes
        return {n: np.concatenate([x] * count, axes[n]) if n in axes else x for n, x in feeds.items()}


def _apart(found: np.ndarray, expected: np.ndarray, least: float) -> float:
    return off(found, expected, least) if found.shape == expected.shape else np.inf


def _largest(x: np.ndarray) -> float:
    return float(np.max(np.abs(x), initial=0.0)) if x.dtype.kind in "iuf" else 0.0
