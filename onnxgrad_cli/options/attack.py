"""Options of an adversarial attack."""

from __future__ import annotations

from onnxgrad_cli.common import checks
from onnxgrad_cli.common.choices import Attack, AttackLoss, Norm
from onnxgrad_cli.errors import conflict, wrong_value
from onnxgrad_cli.options.declare import check, option, options_class

MAX_STEP = (2 - 2**-23) * 2.0**127
"""The largest allowed step size or distance: the largest float32. Its square still fits in float64."""


@options_class
class Fooling(checks.KnownKeywords):
    """Options of an attack.

    `clip` is the smallest and the largest allowed value of the changed input; None takes the range of the data.

    Raises:
        UsageError: a value is not allowed.
    """

    method: Attack = option(
        default="fgsm",
        help="Attack method. fgsm: one step along the sign of the gradient. pgd: several steps, each projected back to "
        "within epsilon of the sample.",
        common=True,
    )
    epsilon: float = option(
        default=0.03,
        help="Largest distance from a sample, on the scale of the model's input.",
        details="This is the scale after any normalization.",
        common=True,
        least=0,
    )
    loss: AttackLoss = option(
        default="cross-entropy",
        help="Loss to maximize; margin (Carlini and Wagner) and dlr have a gradient even if the logits are far apart.",
        details="The margin is the largest logit of another class minus the logit of the labelled class. 'dlr' "
        "(difference of logits ratio) is the margin divided by the range of the largest logits. Both have a gradient "
        "even where that of cross-entropy underflows to 0.",
        common=True,
    )
    steps: int | None = option(default=None, help="pgd: number of steps.", least=1, shown="10")
    step_size: float | None = option(default=None, help="pgd: length of a step.", least=0, shown="2.5 epsilon / steps")
    restarts: int = option(
        default=1,
        help="pgd: number of runs, each from another random start; for each sample, the most successful run counts.",
        details="For each sample, the result is the first successful input, or if there is none, the input with the "
        "highest loss.",
        least=1,
    )
    norm: Norm = option(default="inf", help="Norm in which --epsilon measures the distance.")
    targeted: int | str | None = option(
        default=None,
        help="Class that the model should predict, instead of any wrong class.",
        details="Its number, or the name that the model stores for it.",
        common=True,
        metavar="N|NAME",
    )
    clip: tuple[float, float] | None = None
    start: bool = option(
        default=True,
        help="pgd: start at a random point within epsilon of the sample (--start), or at the sample itself "
        "(--no-start).",
    )
    seed: int = option(default=0, help="pgd: seed of the random starts.", least=0, shown="0")

    def __post_init__(self) -> None:
        check(self)
        if self.targeted is not None and not isinstance(self.targeted, str):
            checks.at_least("targeted", self.targeted, 0, whole=True)
        for name in ("epsilon", "step_size"):
            if (getattr(self, name) or 0) > MAX_STEP:
                raise wrong_value(f"`{name}` is too large for float32", "give it on the scale of the model's input")
        if self.method == "fgsm" and (self.steps, self.step_size, self.restarts) != (None, None, 1):
            raise conflict(
                "fgsm takes a single step of size epsilon; `steps`, `step_size` and `restarts` require pgd",
                "use `method='pgd'`",
            )
        if self.restarts > 1 and not self.start:
            raise conflict(
                "`restarts` requires random starts, because without them all runs are equal", "leave `start=False` out"
            )
        if self.clip is not None and not (len(self.clip) == 2 and self.clip[0] < self.clip[1]):
            raise wrong_value(
                "`clip` must be two numbers, the second larger than the first",
                "give the lowest and the highest value of the input, such as 0 and 1",
            )

    @property
    def random(self) -> bool:
        """True if the attack starts at random points."""
        return self.method == "pgd" and self.start

    @property
    def way(self) -> tuple[int, float]:
        """The number of steps, and their size."""
        if self.method == "fgsm":
            return 1, self.epsilon
        steps = self.steps or 10
        return steps, 2.5 * self.epsilon / steps if self.step_size is None else self.step_size
