"""The attribution method of an explanation, with its settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from onnxgrad_cli.common import checks
from onnxgrad_cli.common.choices import Explanation


@dataclass(frozen=True)
class Method(checks.KnownKeywords):
    """The attribution method and its settings.

    Attributes:
        name: 'saliency', 'smoothgrad', 'integrated-gradients', 'grad-cam' or 'occlusion'.
        repeats: for smoothgrad, the number of noisy copies of each sample.
        noise: for smoothgrad, the standard deviation of the noise as a fraction of the range of values of a sample.
        seed: for smoothgrad, the seed of the noise.
        steps: for integrated-gradients, the number of steps between the baseline and the sample.
        baseline: for integrated-gradients and occlusion: 'zero', 'mean' (of the data), or an .npy or .npz file.
        layer: for grad-cam, the name of a value, or of the node that computes it. The default is the last layer with
            spatial axes.
        window: for occlusion, the size of the hidden window along each axis in which it moves. The default is an eighth
            of the size of the axis.
        stride: for occlusion, the distance between windows along each of these axes. The default is half the size of
            the window, or its whole size for volumes.

    Raises:
        UsageError: the method is unknown, or a number is out of range.
    """

    name: Explanation = "saliency"
    repeats: int = 50
    noise: float = 0.15
    seed: int = 0
    steps: int = 50
    baseline: str | Path = "zero"
    layer: str | None = None
    window: Sequence[int] = ()
    stride: Sequence[int] = ()

    def __post_init__(self) -> None:
        checks.one_of("name", self.name, Explanation)
        checks.at_least("repeats", self.repeats, 1, whole=True)
        checks.at_least("noise", self.noise, 0)
        checks.at_least("seed", self.seed, 0, whole=True)
        checks.at_least("steps", self.steps, 1, whole=True)
        for name in ("window", "stride"):
            for size in getattr(self, name):
                checks.at_least(name, size, 1, whole=True)
