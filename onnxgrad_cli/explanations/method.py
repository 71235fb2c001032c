"""Which method explains a score, and its settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from onnxgrad_cli.common import checks
from onnxgrad_cli.common.choices import Explanation
from onnxgrad_cli.common.keywords import KnownKeywords
from onnxgrad_cli.errors import UsageError, suggest


@dataclass(frozen=True)
class Method(KnownKeywords):
    """How a score is explained.

    Attributes:
        name: 'saliency', 'smoothgrad', 'integrated-gradients', 'grad-cam' or 'occlusion'.
        repeats, noise, seed: of smoothgrad: how many samples of noise, its deviation as a share of a
            sample's range, and where its random numbers begin.
        steps: of integrated-gradients: of the way from the baseline.
        baseline: of integrated-gradients and occlusion: 'zero', 'mean' (of the data), or an .npy or .npz file.
        layer: of grad-cam: a value, or a node; by default the last one with places.
        window, stride: of occlusion: the size of what is hidden, and how far it moves, along each axis of places; by
            default an eighth of the size, and half the window, or all of it in volumes.

    Raises:
        UsageError: a word or a number does not fit.
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
        if self.name not in get_args(Explanation):
            raise UsageError(
                f"there is no method '{self.name}'", suggest(str(self.name), get_args(Explanation), "methods")
            )
        checks.at_least("repeats", self.repeats, 1, whole=True)
        checks.at_least("noise", self.noise, 0)
        checks.at_least("seed", self.seed, 0, whole=True)
        checks.at_least("steps", self.steps, 1, whole=True)
        for name in ("window", "stride"):
            for size in getattr(self, name):
                checks.at_least(name, size, 1, whole=True)
