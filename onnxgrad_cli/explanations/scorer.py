"""The score of a class for each sample, and its gradient by what is explained: a model of derivatives, run on data."""

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
    """A model of the gradient of a class's score by a subject.

    Attributes:
        model: it; the class is the input `said.label`, the score its last output.
        said: what it says of itself.
        independent: whether the samples of a batch are proven not to mix, so that they may be fed together.
    """

    model: ModelProto
    said: Derived
    independent: bool


def differentiate_score(subject: Subject, output: str, class_axis: int, options: Options) -> Differentiated:
    """Make the model of the gradient of the score of a class, for each sample, by a subject.

    Raises:
        UnsupportedError: the model can't be differentiated.
        UsageError: the output has no classes.
    """

    def made(per_sample: bool) -> ModelProto:
        return derive(
            subject.model, of=output, wrt=subject.fed, class_="label", class_axis=class_axis, per_sample=per_sample,
            keep_outputs=True, path=subject.path, options=options,
        )  # fmt: skip

    try:
        model, independent = made(True), True
    except (UnsupportedError, UsageError):  # samples may mix; whatever else is wrong is so without, too
        model, independent = made(False), False
    said = read_derived(model)
    assert said is not None
    return Differentiated(model, said, independent)


class Scorer:
    """Runs a model and its derivatives on samples.

    Attributes:
        size: how many samples may be fed at once; 0 is any number.
    """

    def __init__(self, subject: Subject, output: str, found: Differentiated, fixed: int | None) -> None:
        """Open the sessions.

        Args:
            subject: what is explained.
            output: what is scored.
            found: the gradients.
            fixed: how many samples the model takes at once; None is any number.

        Raises:
            UnsupportedError: the model takes several samples at once, and they may mix.
            OnnxgradError: onnxruntime refuses a model.
        """
        if fixed not in (None, 1) and not found.independent:
            raise UnsupportedError(
                f"the model takes {fixed} samples at once, and they are not proven to be independent",
                hint="export it with a batch of any size, or of 1",
            )
        self.subject, self.output, self._said = subject, output, found.said
        self.size = fixed or (0 if found.independent else 1)
        self._fixed = fixed
        self._score = found.model.graph.output[-1].name
        self._gradient = found.said.outputs[0]
        self._plain = open_session(subject.plain, subject.path)
        self._derived = open_session(found.model, subject.path)

    def values(self, feeds: Feeds) -> tuple[np.ndarray, np.ndarray]:
        """The output that is scored, and the subject, of samples as data have them."""
        if not self.subject.inner:
            return self._run(self._plain, [self.output], feeds)[0], feeds[self.subject.name]
        output, value = self._run(self._plain, [self.output, self.subject.name], feeds)
        return output, value

    def scores(self, feeds: Feeds, moved: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """The scores of samples, float64 (n,), where the subject is `moved`; see `_fed`."""
        return _summed(self._run(self._derived, [self._score], self._fed(feeds, moved, labels))[0])

    def gradients(self, feeds: Feeds, moved: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The scores of samples, float64 (n,), and their gradients by the subject, float64 of its shape."""
        names = [self._score, self._gradient]
        scores, found = self._run(self._derived, names, self._fed(feeds, moved, labels))
        return _summed(scores), found.astype(np.float64)

    def _fed(self, feeds: Feeds, moved: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
        """What the derivatives are fed: an input in place of itself, or what is added to a value in between."""
        return {**feeds, self._said.label: labels, self.subject.fed: moved}

    def _run(self, session: Any, names: list[str], feeds: Feeds) -> list[np.ndarray]:
        """The values of a session for n samples, of which one that takes more at once is fed copies of the last.

        Raises:
            OnnxgradError: onnxruntime fails on them.
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


def _summed(scores: np.ndarray) -> np.ndarray:
    """The score of each sample, (n,): the sum of the scores of its places."""
    return scores.astype(np.float64).reshape(len(scores), -1).sum(1)


@dataclass(frozen=True)
class Case:
    """Some samples that are explained.

    Attributes:
        scorer: runs the model.
        feeds: the samples as data have them, input -> (n, ...).
        x: the subject of these samples, (n, ...).
        labels: the classes whose scores are explained, int64, of the shape of the output without its classes.
    """

    scorer: Scorer
    feeds: Feeds
    x: np.ndarray
    labels: np.ndarray

    def scores(self, x: np.ndarray) -> np.ndarray:
        """The scores, float64 (n,), where the subject is `x`."""
        return self.scorer.scores(self.feeds, self._moved(x), self.labels)

    def gradients(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The scores, float64 (n,), and their gradients by the subject, float64 (n, ...), where the subject is `x`."""
        return self.scorer.gradients(self.feeds, self._moved(x), self.labels)

    def _moved(self, x: np.ndarray) -> np.ndarray:
        moved = np.asarray(x, np.float64) - self.x if self.scorer.subject.inner else x
        return np.asarray(moved, self.x.dtype)
