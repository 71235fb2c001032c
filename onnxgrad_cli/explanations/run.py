"""Run an attribution method on samples, batch by batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from onnxgrad_cli.common.narration import Tell
from onnxgrad_cli.data import Data
from onnxgrad_cli.data.pictures import layout_of
from onnxgrad_cli.errors import OnnxgradError, wrong_shape, wrong_value
from onnxgrad_cli.explanations.attributions import grad_cam, integrated_gradients, occlusion, saliency, smoothgrad
from onnxgrad_cli.explanations.method import Method
from onnxgrad_cli.explanations.open_samples import TOGETHER, Scored, batches, labels_of
from onnxgrad_cli.explanations.scorer import Case, Scorer
from onnxgrad_cli.ir.graph import Graph

INCOMPLETE = 0.05
"""If the error of integrated gradients is larger than this, a caution is printed; see `integrated_gradients`."""


class Attributions(NamedTuple):
    """The attributions of n samples with their classes, scores and errors; see `Explained`."""

    values: np.ndarray
    classes: np.ndarray
    scores: np.ndarray
    gaps: np.ndarray | None


@dataclass(frozen=True)
class Run:
    """The settings that all batches of an explanation share.

    Attributes:
        method: the attribution method.
        what, class_: the output with the class scores, and the class whose score is explained.
        scorer: the scorer that runs the model.
        data: the samples.
        label: the name of the label array in the data; None if no labels are read.
        graph: the model with types.
        baseline: the baseline, in a shape that broadcasts to samples.
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
        """Return the attributions of some samples.

        Args:
            rows: the numbers of the samples.
            tell: function that prints progress and cautions, such as that all attributions are zero.

        Raises:
            UsageError: a setting does not fit the samples, or the class doesn't exist.
            OnnxgradError: the attributions are not finite.
        """
        # Samples of different lengths run one by one, because not every model has a mask for padding.
        parts: list[Attributions] = []
        for part in batches(rows, self.scorer, 1 if self.data.ragged else TOGETHER):
            tell(f"explained {sum(len(each.values) for each in parts)} of {len(rows)} samples", 1)
            parts.append(self._explained(part))
        if self.data.ragged:
            parts = _padded(parts)
        if len({part.values.shape[1:] for part in parts}) > 1:
            raise wrong_shape("the samples have different shapes", "choose samples of one length with `sample`")
        values, classes, scores = (np.concatenate(each) for each in list(zip(*parts, strict=True))[:3])
        if not np.isfinite(values).all():
            hint = "look for infinite or very large values in data and weights"
            raise OnnxgradError("some attributions are not finite", hint, code="not_finite")
        if not values.any():
            tell("caution: all attributions are zero: the score does not depend on the explained value", 0)
        gaps = np.concatenate([np.zeros(0), *(part.gaps for part in parts if part.gaps is not None)])
        if off := int((gaps > INCOMPLETE).sum()):
            tell(
                f"caution: in {off} of {len(gaps)} samples, the attributions do not add up to the difference of the "
                f"scores. The largest gap is {gaps.max():.3g} of the difference: set more `steps`", 0,
            )  # fmt: skip
        return Attributions(values, classes, scores, gaps if gaps.size else None)

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
            values, gaps = integrated_gradients(case, self.baseline, method.steps)
        return Attributions(values.astype(np.float32), case.labels, case.scores(case.x), gaps)

    def windows(self, shape: Sequence[int]) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
        """Return the axes along which windows move, the sizes of a window, and its strides, for a shape of samples.

        Raises:
            UsageError: the number of sizes differs from the number of axes, or a window is too large.
        """
        axes = self.places(len(shape))
        window = self._each("window", self.method.window, [max(shape[axis] // 8, 1) for axis in axes])
        for axis, size in zip(axes, window, strict=True):
            if size > shape[axis]:
                raise wrong_value(f"`window={size}`: axis {axis} has only {shape[axis]} positions")
        share = 2 if len(axes) < 3 else 1  # a volume would have thousands of windows that overlap by half
        return axes, window, self._each("stride", self.method.stride, [max(size // share, 1) for size in window])

    def places(self, rank: int) -> list[int]:
        """Return the axes of the explained value that windows move along.

        These are all axes except the batch and the channels. For an inner value, such as embeddings of tokens, and for
        a value with two axes, it is axis 1 alone.
        """
        if self.scorer.subject.inner or rank < 3:
            return [1]
        layout = layout_of(self.graph.types[self.scorer.subject.name])
        channels = 1 if layout is None else layout.axis
        return [axis for axis in range(1, rank) if axis != channels]

    def channels(self, rank: int) -> int | None:
        """Return the axis of the channels in the explained value, or None if it has no channels."""
        places = self.places(rank)
        return next((axis for axis in range(1, rank) if axis not in places), None)

    def words(self) -> str:
        """Return a text that describes the method and its settings."""
        method = self.method
        base = f"a baseline of {'zeros' if method.baseline == 'zero' else method.baseline}"
        if method.name == "smoothgrad":
            noise = f"{method.repeats} samples with noise of {method.noise:g} of their range (seed {method.seed})"
            return f"smoothgrad: the mean gradient at {noise}"
        if method.name == "occlusion":
            sizes = [" x ".join(map(str, each)) for each in self.windows(self.case(np.arange(1)).x.shape)[1:]]
            return f"occlusion by {base}, windows of {sizes[0]} every {sizes[1]}"
        return {
            "saliency": "saliency, the magnitude of the gradient",
            "integrated-gradients": f"integrated gradients in {method.steps} steps from {base}",
            "grad-cam": "Grad-CAM",
        }[method.name]

    def case(self, rows: np.ndarray) -> Case:
        """Return the samples with these numbers as a batch, with the classes to explain."""
        feeds = self.data.batch(rows)
        given = feeds.pop(self.label) if self.label else None
        output, x = self.scorer.values(feeds)
        return Case(self.scorer, feeds, x, labels_of(self.class_, self.what, output, given))

    def _each(self, name: str, asked: Sequence[int], default: list[int]) -> list[int]:
        if len(asked) not in (0, 1, len(default)):
            raise wrong_value(f"`{name}` has {len(asked)} sizes, but the window has {len(default)} axes")
        return list(asked) * (len(default) if len(asked) == 1 else 1) if asked else default


def _padded(parts: Sequence[Attributions]) -> list[Attributions]:
    """Return attributions of tokens, padded with zeros to the length of the longest sample."""
    longest = max(part.values.shape[1] for part in parts)

    def padded(values: np.ndarray) -> np.ndarray:
        return np.pad(values, [(0, 0), (0, longest - values.shape[1]), *[(0, 0)] * (values.ndim - 2)])

    return [part._replace(values=padded(part.values)) for part in parts]
