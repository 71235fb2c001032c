"""Compare a model whose fixed batch size was made dynamic with the original, sample by sample.

The pass that rewrites the model proves on the graph that results stay the same. The runs here guard against errors in
that pass and in onnxruntime.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from onnx import ModelProto

from onnxgrad_cli.errors import Caution, OnnxgradError, UnsupportedError
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.execution.limits import OverLimit, within_budget
from onnxgrad_cli.execution.observation import is_quick
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.types import Arrays
from onnxgrad_cli.ir.weightless_copy import copied
from onnxgrad_cli.options import ShapeOptions
from onnxgrad_cli.passes.prepare.free_batch import HINT, NOT_COMPARED, FixedBatch, FreedBatch, asked_batch, free_batch
from onnxgrad_cli.verification.feeds import DescribedModel, first_run
from onnxgrad_cli.verification.gradients.judgement import off
from onnxgrad_cli.verification.original_model import with_weights

BATCHES = 3
"""Number of the original's batches that are joined to one batch of the changed model, to compare the results."""

RELATIVE_TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "float16": 2e-2}
"""Element type -> largest accepted difference, relative to the largest entry.

The difference is not zero because kernels may sum in a different order at a different batch size.
"""


@dataclass(frozen=True)
class FreedModel:
    """A model whose fixed batch size was made dynamic.

    Attributes:
        model, original: the model with the dynamic batch size, and with the fixed one.
        path: the file of the original; external data are relative to it.
        batch: the batch size that was made dynamic, and the axes of the samples.
    """

    model: ModelProto
    original: ModelProto
    path: Path | None
    batch: FreedBatch

    def compare(self, data: Mapping[str, np.ndarray] | None = None) -> Caution:
        """Compare runs of both models, and return a note for a report.

        Args:
            data: input -> an array with `samples` samples. Other inputs are drawn at random.

        Raises:
            UnsupportedError: the results differ.
        """
        try:
            with within_budget(limited=is_quick(self.original)):
                compared = _compare(self, data or {})
        except OverLimit as error:
            compared = f"{NOT_COMPARED}: {error.message}"
        return self.batch.caution(compared)

    @property
    def samples(self) -> int:
        """Return the number of samples that a comparison uses."""
        return BATCHES * self.batch.size


def freed(
    model: ModelProto, path: Path | None, batch: FixedBatch, shapes: Mapping[str, object] | None = None
) -> FreedModel:
    """Return the model with a dynamic batch size; see `free_batch`. The given model is not changed.

    Raises:
        UnsupportedError: the batch size can't be made dynamic.
    """
    graph = Graph(copied(model), path)
    found = free_batch(graph, batch, shapes)
    return FreedModel(graph.commit(), model, path, found)


def free_asked(graph: Graph, options: ShapeOptions) -> list[Caution]:
    """If the option `shapes` requests a dynamic batch size, make it dynamic in the graph, and compare the results.

    Raises:
        UsageError: `shapes` contradicts the model in something other than the batch size.
        UnsupportedError: the batch size can't be made dynamic, or the results differ from the original's.
    """
    model = graph.commit()
    batch = asked_batch(model, options)
    if batch is None:
        return []
    original = copied(model)
    return [FreedModel(model, original, graph.path, free_batch(graph, batch, options.shapes)).compare()]


def _compare(both: FreedModel, data: Mapping[str, np.ndarray]) -> str:
    """Compare runs of both models, and return a description of the comparison.

    Raises:
        UnsupportedError: the results differ.
    """
    freed, count = both.batch, both.samples
    try:
        run_original = Executor(with_weights(both.original, both.path))
    except OnnxgradError:
        raise
    except Exception:  # onnxruntime's exceptions share no base class
        return f"{NOT_COMPARED}, because onnxruntime does not load the original"

    def by_batches(feeds: Arrays) -> list[Arrays]:
        size = freed.size
        return [run_original(_taken(feeds, freed, i * size, (i + 1) * size)) for i in range(BATCHES)]

    described = DescribedModel.of_inference(both.original)
    for name, axis in freed.inputs.items():  # draw several batches at once
        shape = described.shapes[name]
        described.shapes[name] = (*shape[:axis], count, *shape[axis + 1 :])
    try:
        rng = np.random.default_rng(0)
        feeds, _, _ = first_run(lambda feeds: by_batches(feeds)[-1], described, rng, dict(data), {})
        expected = by_batches(feeds)
    except OverLimit:
        raise
    except Exception:  # onnxruntime's exceptions share no base class
        return f"{NOT_COMPARED}, because the original does not run on random data"
    try:
        run = Executor(with_weights(both.model, both.path))
        found, first = run(feeds), run(_taken(feeds, freed, 0, 1))
    except OnnxgradError:
        raise
    except Exception as error:  # onnxruntime's exceptions share no base class
        raise _differs(f"the model does not run on a batch of {count}: {str(error).splitlines()[0]}") from None
    for name in expected[0]:
        place = freed.outputs.get(name)
        parts = [each[name] for each in expected]
        if place is None:
            _check(name, found[name], parts[0])
            continue
        axis = place.axis
        before = place.before.number if not place.before.symbols else None
        if before is None:
            before = parts[0].shape[axis] // (freed.size * place.after.number)
        whole = np.concatenate([_split(part, axis, before, freed.size) for part in parts], axis + 1)
        _check(name, _split(found[name], axis, before, count), whole)
        _check(name, _split(first[name], axis, before, 1), np.take(whole, [0], axis + 1))
    return f"a run with {count} samples gives the same results as the original"


def _split(array: np.ndarray, axis: int, before: int, count: int) -> np.ndarray:
    """Return an array in which one axis is split in three. The middle one has `count` entries, one per sample.

    `before` is the size of the first of the three.

    Raises:
        UnsupportedError: the size of the axis is not a multiple of the number of samples.
    """
    try:
        return array.reshape(*array.shape[:axis], before, count, -1, *array.shape[axis + 1 :])
    except ValueError:
        raise _differs(
            f"an output has the shape {list(array.shape)}, and {count} samples do not divide its axis {axis}"
        ) from None


def _taken(feeds: Mapping[str, np.ndarray], freed: FreedBatch, start: int, end: int) -> Arrays:
    """Return the feeds of the samples from `start` to `end`, without `end`."""
    return {
        name: np.ascontiguousarray(np.take(x, range(start, end), freed.inputs[name])) if name in freed.inputs else x
        for name, x in feeds.items()
    }


def _check(name: str, found: np.ndarray, expected: np.ndarray) -> None:
    """Check that an output of the model with a dynamic batch size agrees with the original's.

    Raises:
        UnsupportedError: the results differ.
    """
    if found.shape != expected.shape:
        raise _differs(f"'{name}' has the shape {list(found.shape)} instead of {list(expected.shape)}")
    exact, tolerance = expected.dtype.kind in "iubOUS", RELATIVE_TOLERANCE.get(expected.dtype.name, 2e-2)
    if not (np.array_equal(found, expected) if exact else off(found, expected) <= tolerance):
        raise _differs(f"'{name}' differs by {off(found, expected):.3g}, relative to its largest entry")


def _differs(why: str) -> UnsupportedError:
    return UnsupportedError(
        f"the batch size can't be made symbolic: in a comparison with the original, {why}", hint=HINT
    )
