"""Compute class scores of samples, and the gradients of the scores, with a model of derivatives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import ModelProto

from onnxgrad_cli.derivatives.kinds import derive
from onnxgrad_cli.errors import UnsupportedError, UsageError
from onnxgrad_cli.execution.session import of_samples, open_session
from onnxgrad_cli.explanations.subject import Subject
from onnxgrad_cli.metadata import Derived, read_derived
from onnxgrad_cli.options import Options

Feeds = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Differentiated:
    """A model that computes the gradient of a class score with respect to a subject (an input or an inner value).

    Attributes:
        model: the model. Its input `said.label` takes the class, and its last output is the score.
        said: the description of the derivatives in the model's metadata.
        independent: True if the samples of a batch are proven to be independent, so that they can be fed together.
    """

    model: ModelProto
    said: Derived
    independent: bool


def differentiate_score(subject: Subject, output: str, class_axis: int, options: Options) -> Differentiated:
    """Build a model that computes, for each sample, the gradient of a class score with respect to a subject.

    Raises:
        UnsupportedError: the model can't be differentiated.
        UsageError: the output doesn't have the axis of classes.
    """

    def made(per_sample: bool) -> ModelProto:
        return derive(
            subject.model, of=output, wrt=subject.fed, class_="label", class_axis=class_axis, per_sample=per_sample,
            keep_outputs=True, path=subject.path, options=options,
        )  # fmt: skip

    try:
        model, independent = made(True), True
    except (UnsupportedError, UsageError):  # samples may depend on each other; other errors are raised again below
        model, independent = made(False), False
    said = read_derived(model)
    assert said is not None
    return Differentiated(model, said, independent)


class Scorer:
    """Runs a model and its derivatives on samples.

    Attributes:
        size: the largest number of samples that can be fed at once; 0 means any number.
        score, gradient: the names of the outputs with the score of the class, and with its gradient.
    """

    def __init__(self, subject: Subject, output: str, found: Differentiated, fixed: int | None) -> None:
        """Open the sessions.

        Args:
            subject: the value to which scores are attributed.
            output: the output with the scores.
            found: the model that computes the gradients.
            fixed: the batch size of the model if it is fixed; None for any size.

        Raises:
            UnsupportedError: the fixed batch size is larger than 1, and the samples are not proven to be independent.
            OnnxgradError: onnxruntime can't load a model.
        """
        if fixed not in (None, 1) and not found.independent:
            raise UnsupportedError(
                f"the model takes exactly {fixed} samples at once, and may mix them",
                hint="export the model with a symbolic batch size, or a batch of 1",
            )
        self.subject, self.output = subject, output
        self.size = fixed or (0 if found.independent else 1)
        self.score, self.gradient = found.model.graph.output[-1].name, found.said.outputs[0]
        self._fixed, self._label = fixed, found.said.label
        self._plain = open_session(subject.plain, subject.path)
        self._derived = open_session(found.model, subject.path)

    def values(self, feeds: Feeds) -> tuple[np.ndarray, np.ndarray]:
        """Return the output of the model for these feeds, and the value that is explained or attacked."""
        output, *inner = self._run(self._plain, [self.output, *[self.subject.name] * self.subject.inner], feeds)
        return output, inner[0] if inner else feeds[self.subject.name]

    def derived(self, output: str, feeds: Feeds, moved: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Return the output `score` or `gradient` of the derivatives for some samples, float64 (n, ...).

        `moved` replaces the subject if that is an input. If the subject is an inner value, `moved` is added to it.
        """
        fed = {**feeds, self._label: labels, self.subject.fed: moved}
        return self._run(self._derived, [output], fed)[0].astype(np.float64)

    def _run(self, session: Any, names: list[str], feeds: Feeds) -> list[np.ndarray]:
        """Run a session on some samples, and return the outputs `names`.

        If the model has a fixed batch size and there are fewer samples, copies of the last sample fill the batch.

        Raises:
            OnnxgradError: onnxruntime fails.
        """
        wanted = {each.name for each in session.get_inputs()}
        fed = {name: array for name, array in feeds.items() if name in wanted}
        count = next(len(array) for array in fed.values() if array.ndim)
        if self._fixed is not None and count < self._fixed:
            spare = self._fixed - count
            fed = {k: np.concatenate([v, v[-1:].repeat(spare, 0)]) if v.ndim else v for k, v in fed.items()}
        fed = {name: np.ascontiguousarray(array) for name, array in fed.items()}
        with of_samples():
            return [array[:count] for array in session.run(names, fed)]


@dataclass(frozen=True)
class Case:
    """A batch of samples to explain.

    Attributes:
        scorer: the scorer that runs the model.
        feeds: input -> its values for the samples, (n, ...).
        x: the values of the subject for these samples, (n, ...).
        labels: the classes whose scores are explained, int64, in the shape of the output without its axis of classes.
    """

    scorer: Scorer
    feeds: Feeds
    x: np.ndarray
    labels: np.ndarray

    def scores(self, x: np.ndarray) -> np.ndarray:
        """Return the scores, float64 (n,), for the values `x` of the subject.

        The scores of a sample at several positions are added.
        """
        return self._derived(self.scorer.score, x).reshape(len(x), -1).sum(1)

    def gradients(self, x: np.ndarray) -> np.ndarray:
        """Return the gradients of the scores, float64 (n, ...), for the values `x` of the subject."""
        return self._derived(self.scorer.gradient, x)

    def _derived(self, output: str, x: np.ndarray) -> np.ndarray:
        moved = np.asarray(x, np.float64) - self.x if self.scorer.subject.inner else x
        return self.scorer.derived(output, self.feeds, np.asarray(moved, self.x.dtype), self.labels)
