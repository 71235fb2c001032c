"""A method on the samples of data, batch by batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from onnxgrad_cli.common.narration import Tell
from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.explanations.grad_cam import grad_cam
from onnxgrad_cli.explanations.integrated_gradients import integrated_gradients
from onnxgrad_cli.explanations.method import Method
from onnxgrad_cli.explanations.occlusion import occlusion
from onnxgrad_cli.explanations.saliency import saliency
from onnxgrad_cli.explanations.samples import TOGETHER, Scored, batches, labels_of
from onnxgrad_cli.explanations.scorer import Case, Scorer
from onnxgrad_cli.explanations.smoothgrad import smoothgrad
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.training.data import Data
from onnxgrad_cli.training.data.picture_layout import layout_of

INCOMPLETE = 0.05
"""The share by which attributions may be off from what they add up to, before that is a caution."""


class Attributions(NamedTuple):
    """What a method has found of n samples; see `Explained`."""

    values: np.ndarray
    classes: np.ndarray
    scores: np.ndarray
    gaps: np.ndarray | None


@dataclass(frozen=True)
class Run:
    """What all batches of an explanation share.

    Attributes:
        method: how they are explained.
        what, class_: the output and the class of it whose score is explained.
        scorer: runs the model.
        data: the samples.
        label: what the data call the labels; None where there are none.
        baseline: what stands for nothing, which broadcasts to samples.
        graph: the model, typed.
    """

    method: Method
    what: Scored
    scorer: Scorer
    data: Data
    class_: int | str
    label: str | None
    graph: Graph
    baseline: np.ndarray = field(default_factory=lambda: np.zeros(()))

    def explain(self, rows: np.ndarray, tell: Tell) -> Attributions:
        """The attributions of some samples.

        Args:
            rows: their numbers.
            tell: takes what is narrated, such as that they are all zero.

        Raises:
            UsageError: a setting does not fit, or there is no such class.
            OnnxgradError: they are not finite.
        """
        ragged = self.data.ragged  # then one by one: not every model is told what stands behind the end of a sample
        parts: list[Attributions] = []
        for part in batches(rows, self.scorer, 1 if ragged else TOGETHER):
            tell(f"explaining: {sum(len(each.values) for each in parts)} of {len(rows)} samples are done", 1)
            parts.append(self._explained(part))
        if ragged:
            parts = _padded(parts)
        if len({part.values.shape[1:] for part in parts}) > 1:
            raise UsageError("samples of different lengths can't be explained at once", "choose some with `sample`")
        values, classes, scores = (np.concatenate(each) for each in list(zip(*parts, strict=True))[:3])
        if not np.isfinite(values).all():
            raise OnnxgradError(
                "the attributions are not all finite", "see with `onnxgrad doctor` where numbers overflow"
            )
        if not values.any():
            tell("caution: all attributions are zero: the score does not answer to what is explained", 0)
        gaps = [part.gaps for part in parts if part.gaps is not None]
        found = Attributions(values, classes, scores, np.concatenate(gaps) if gaps else None)
        self._tell_gaps(found.gaps, tell)
        return found

    def _explained(self, rows: np.ndarray) -> Attributions:
        case, method, gaps = self.case(rows), self.method, None
        if method.name == "saliency":
            values = saliency(case)
        elif method.name == "smoothgrad":
            values = smoothgrad(case, rows.tolist(), method.repeats, method.noise, method.seed)
        elif method.name == "grad-cam":
            values = grad_cam(case)
        elif method.name == "occlusion":
            values = occlusion(case, self.baseline, *self.windows(case.x.shape))
        else:
            found = integrated_gradients(case, self.baseline, method.steps)
            values, gaps = found.values, found.gap()
        return Attributions(values.astype(np.float32), case.labels, case.scores(case.x), gaps)

    def _tell_gaps(self, gaps: np.ndarray | None, tell: Tell) -> None:
        off = 0 if gaps is None else int((gaps > INCOMPLETE).sum())
        if gaps is not None and off:
            tell(
                f"caution: in {off} of {len(gaps)} samples attributions do not add up to the difference of the scores: "
                f"they are off by up to {gaps.max():.3g} of it: take more `steps`",
                0,
            )

    def windows(self, shape: Sequence[int]) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
        """The axes of places, and along each the window and its stride, for samples of a shape.

        Raises:
            UsageError: there are not as many sizes as axes.
        """
        axes = self.places(len(shape))
        window = self._each("window", self.method.window, [max(shape[axis] // 8, 1) for axis in axes])
        for axis, size in zip(axes, window, strict=True):
            if size > shape[axis]:
                raise UsageError(f"`window={size}`: there are {shape[axis]} places along axis {axis}")
        share = 2 if len(axes) < 3 else 1  # in volumes, windows that overlap by halves would be thousands
        return axes, window, self._each("stride", self.method.stride, [max(size // share, 1) for size in window])

    def places(self, rank: int) -> list[int]:
        """The axes of what is explained that windows move along."""
        if self.scorer.subject.inner or rank < 3:
            return [1]
        layout = layout_of(self.graph.types[self.scorer.subject.name])
        channels = 1 if layout is None else layout.axis
        return [axis for axis in range(1, rank) if axis != channels]

    def channels(self, rank: int) -> int | None:
        """The axis of what is explained that is no place, if there is one."""
        places = self.places(rank)
        return next((axis for axis in range(1, rank) if axis not in places), None)

    def words(self) -> str:
        """The method with its settings."""
        method = self.method
        base = f"a baseline of {'zeros' if method.baseline == 'zero' else method.baseline}"
        if method.name == "smoothgrad":
            noise = f"{method.repeats} samples with noise of {method.noise:g} of their range (seed {method.seed})"
            return f"smoothgrad: the mean gradient at {noise}"
        if method.name == "occlusion":
            sizes = [_sizes(each) for each in self.windows(self.case(np.arange(1)).x.shape)[1:]]
            return f"occlusion by {base}, windows of {sizes[0]} every {sizes[1]}"
        return {
            "saliency": "saliency, the magnitude of the gradient",
            "integrated-gradients": f"integrated gradients in {method.steps} steps from {base}",
            "grad-cam": "Grad-CAM",
        }[method.name]

    def case(self, rows: np.ndarray) -> Case:
        """Some samples, by their numbers, with the classes that are looked at."""
        feeds = self.data.batch(rows)
        given = feeds.pop(self.label) if self.label else None
        output, x = self.scorer.values(feeds)
        return Case(self.scorer, feeds, x, labels_of(self.class_, self.what, output, given))

    def _each(self, name: str, asked: Sequence[int], default: list[int]) -> list[int]:
        if len(asked) not in (0, 1, len(default)):
            raise UsageError(f"`{name}` has {len(asked)} sizes, and there are {len(default)} axes of places")
        return list(asked) * (len(default) if len(asked) == 1 else 1) if asked else default


def _padded(parts: Sequence[Attributions]) -> list[Attributions]:
    """The attributions of batches of tokens, with zeros behind the ends of those that are shorter."""
    longest = max(part.values.shape[1] for part in parts)

    def padded(values: np.ndarray) -> np.ndarray:
        return np.pad(values, [(0, 0), (0, longest - values.shape[1]), *[(0, 0)] * (values.ndim - 2)])

    return [part._replace(values=padded(part.values)) for part in parts]


def _sizes(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes))
