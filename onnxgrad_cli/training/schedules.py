"""Learning rate schedules. Each schedule is a function of the step, with the values of its PyTorch counterpart.

The rate depends only on the step, so that a run resumed at step 1000 continues with the rate of step 1000. The
exception is `plateau`, which stores results of earlier validations.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onnxgrad_cli.common import checks
from onnxgrad_cli.common.catalogue import Catalogue, Documented
from onnxgrad_cli.common.settings import Length, Lengths, Option, chosen, declared, exactly, require, spelled
from onnxgrad_cli.errors import OnnxgradError, conflict, missing_value, unreadable

if TYPE_CHECKING:
    from onnxgrad_cli.losses.spec import LossSpec

LENGTH = "steps, a fraction of all steps (below 1), or epochs such as 3e"
CYCLED = {
    "cycle_momentum": "lower the momentum, or beta1, while the rate rises, and raise it while the rate falls",
    "base_momentum": "with cycle-momentum: the lowest momentum",
    "max_momentum": "with cycle-momentum: the highest momentum",
}

FINAL = "last rate, as a fraction of the first"


Factor = Callable[[int], float]
"""A function of the number of completed steps that returns the factor by which to multiply the learning rate."""


@dataclass(frozen=True)
class Cycle:
    """A factor of the learning rate together with a momentum, which falls while the factor rises.

    Attributes:
        factor: the number of completed steps -> the factor.
        momentum: the number of completed steps -> the momentum of SGD, or beta1 of Adam.
    """

    factor: Factor
    momentum: Factor

    def __call__(self, step: int) -> float:
        """Return the factor after `step` steps."""
        return self.factor(step)


@dataclass(frozen=True)
class Kind(Documented):
    """A kind of schedule.

    Attributes:
        name: the name on the command line.
        function: `function(steps, **options)` returns a `Factor` for a run with this number of steps.
        options: the keyword options of `function`.
        watches: True if the rate depends on the validation loss. The result of `function` then also has the methods
            `observe(loss)`, `state()`, which returns a JSON-serializable dict, and `restore(state)`.
    """

    name: str
    function: Callable[..., Any]
    options: tuple[Option, ...]
    watches: bool


SCHEDULES: Catalogue[Kind] = Catalogue("schedule", "schedules", [])
"""All schedules, the simple ones first."""


def schedule(
    name: str, *, options: Mapping[str, str] | None = None, watches: bool = False, override: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as a schedule; its keyword-only parameters are its options.

    Args:
        name: the name of the schedule on the command line.
        watches: True if the rate depends on the validation loss, as in `Kind`.
        options: option -> its description. Types and defaults are read from the function's signature.
        override: replace a schedule with the same name instead of raising.

    Raises:
        OnnxgradError: the name is already used, or an option is not documented.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        found = declared(function, options, f"schedule '{name}'")
        SCHEDULES.add(name, Kind(name, function, found, watches), override)
        return function

    return register


class Schedule:
    """The learning rate of each step of a run. It may begin with a warm-up.

    Attributes:
        kind: the kind of schedule.
        base: the learning rate that the factors multiply.
        steps: the number of steps of the run, including the warm-up.
        warmup: the number of warm-up steps, in which the rate rises to the rate at which the schedule then begins.
    """

    def __init__(
        self, kind: Kind, base: float, steps: int, options: Mapping[str, object] | None = None, epoch: int | None = None
    ) -> None:
        """Args:
        kind, base, steps: see the attributes of `Schedule`.
        options: options of the kind and of `warm_up`, by name; lengths may be in epochs, such as '3e'.
        epoch: the number of steps per epoch, required for lengths in epochs.

        Raises:
            UsageError: an option is unknown or does not fit, or the rate is not a positive number.
        """
        checks.of_type("kind", kind, Kind, "one of SCHEDULES, such as parse_schedule takes by name")
        require(checks.is_number(base, 0.0) and base > 0, f"learning_rate must be above 0, not {base!r}")
        checks.at_least("steps", steps, 0, whole=True)
        given, before = in_steps({**(options or {})}, (*kind.options, *WARM_UP), epoch), {o.name for o in WARM_UP}
        warming = exactly(WARM_UP, {name: given.pop(name) for name in before & given.keys()}, "warm-up")
        self.kind, self.base, self.steps = kind, base, max(steps, 1)
        self.warmup, self._begin = warm_up(self.steps, **warming)
        self._factor = kind.function(max(self.steps - self.warmup, 1), **exactly(kind.options, given, kind.name))

    @property
    def watches(self) -> bool:
        """True if the rate depends on the validation loss. The caller must then pass each loss to `observe`."""
        return self.kind.watches

    def rate(self, step: int) -> float:
        """Return the learning rate after `step` steps; the first step has `step` 0."""
        if step >= self.warmup:
            return self.base * self._factor(step - self.warmup)
        return self.base * self._factor(0) * self._begin(step)

    def momentum(self, step: int) -> float | None:
        """Return the momentum, or beta1, after `step` steps; None if the schedule doesn't change it."""
        return self._factor.momentum(max(step - self.warmup, 0)) if isinstance(self._factor, Cycle) else None

    def observe(self, loss: float) -> None:
        """Record a validation loss. Schedules with `watches` False ignore it."""
        if self.watches:
            self._factor.observe(loss)

    def state(self) -> dict[str, Any]:
        """Return the state that depends on the observed losses, as a JSON-serializable dict."""
        return self._factor.state() if self.watches else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state that the method `state` returned.

        Raises:
            OnnxgradError: the state belongs to another schedule, or is damaged.
        """
        if set(state) != set(self.state()):
            message = f"this is not the state of the schedule '{self.kind.name}'"
            raise OnnxgradError(message, "use the schedule of the checkpoint", code="mismatch")
        if self.watches:
            self._factor.restore(state)


def parse_schedule(text: str, base: float, steps: int, epoch: int | None = None) -> Schedule:
    """Parse `NAME[:KEY=VALUE,...]`, such as `cosine:warmup=100,final=0.01` or `step:every=3e,factor=0.5`.

    Args:
        text: a name in `SCHEDULES`, with options.
        base: the learning rate.
        steps: the number of steps of the run.
        epoch: the number of steps per epoch, required for lengths such as 3e.

    Raises:
        UsageError: the schedule doesn't exist, or an option does not fit.
    """
    checks.text("schedule", text)
    name, options = spelled(text)
    return Schedule(SCHEDULES.lookup(name), base, steps, options, epoch)


def weight_schedule(spec: LossSpec, steps: int, epoch: int | None = None) -> Schedule:
    """Return the schedule of the weight of a loss. The arguments `steps` and `epoch` are those of `parse_schedule`.

    Raises:
        UsageError: the schedule doesn't exist, an option does not fit, or it depends on the validation loss.
    """
    found = parse_schedule(spec.schedule, spec.weight, steps, epoch)
    if found.watches:
        message = f"`losses`: the weight of '{spec.name}' can't follow '{found.kind.name}'"
        raise conflict(f"{message}, which depends on the validation loss", "choose another schedule")
    return found


def cycles_momentum(text: str) -> bool:
    """Return True if a schedule also changes the momentum. The text is as in `parse_schedule`.

    Raises:
        UsageError: the schedule doesn't exist.
    """
    checks.text("schedule", text)
    name, options = spelled(text)
    asked = {"cycle_momentum": options.get("cycle_momentum", False)}
    return bool(chosen(SCHEDULES.lookup(name).options, asked).get("cycle_momentum"))


def in_steps(given: dict[str, object], options: Iterable[Option], epoch: int | None) -> dict[str, object]:
    """Replace lengths in epochs, such as '3e', by numbers of steps, in place, and return the options.

    Raises:
        UsageError: a length is in epochs, and the number of steps per epoch is unknown.
    """
    for option in options:
        value = given.get(option.name)
        if option.kind in ("Length", "Lengths") and isinstance(value, str):
            parts = [_of_epochs(part, option.name, epoch) for part in value.split("/")]
            given[option.name] = parts[0] if option.kind == "Length" and len(parts) == 1 else "/".join(map(str, parts))
    return given


def _of_epochs(text: str, name: str, epoch: int | None) -> str | int:
    """Return a length in epochs as a number of steps, and any other text unchanged."""
    found = re.fullmatch(r"(\d+\.?\d*)e", text)
    if found is None:
        return text
    if epoch is None:
        hint = "pass the number of steps per epoch, or give a number of steps"
        raise missing_value(f"option {name}: '{text}' is in epochs, but the number of steps per epoch is unknown", hint)
    count = float(found[1])
    return max(round(count * epoch), 1) if count else 0


def length(value: float, steps: int, name: str) -> int:
    """Convert a length to a number of steps.

    A value below 1 is a fraction of all steps, any other a number of steps.
    """
    require(value >= 0 and (value < 1 or value == int(value)), f"{name} takes {LENGTH}, not {value:g}")
    return round(value * steps) if value < 1 else int(value)


def _stretch(value: float, steps: int, name: str) -> int:
    """Convert a length as `length` does, but return at least one step."""
    require(value > 0, f"{name} must be above 0, not {value:g}")
    return max(length(value, steps, name), 1)


def _is_part(value: float, name: str) -> None:
    require(0 <= value <= 1, f"{name} must lie between 0 and 1, not {value:g}")


def warm_up(steps: int, *, warmup: Length = 0.0, warmup_start: float = 0.01) -> tuple[int, Callable[[int], float]]:
    """Raise the rate linearly before the schedule begins. As LinearLR in torch.optim.lr_scheduler.

    Returns:
        The number of warm-up steps, and a function from a step to the factor of the rate.
    """
    count = length(warmup, steps, "warmup")
    require(count < steps or not count, f"warmup must have fewer steps than the run, which has {steps}")
    _is_part(warmup_start, "warmup_start")
    return count, lambda step: warmup_start + (1 - warmup_start) * step / count


WARM_UP = declared(
    warm_up,
    {
        "warmup": f"how long the rate rises at the start: {LENGTH}",
        "warmup_start": "first rate, as a fraction of the rate after the warm-up",
    },
    "warm-up",
)
"""The options of the warm-up, which every schedule has in addition to its own."""


@schedule("constant")
def constant(steps: int) -> Factor:
    """Constant rate."""
    return lambda step: 1.0


@schedule(
    "step",
    options={"every": f"how long the rate is constant: {LENGTH}", "factor": "factor for the rate after each interval"},
)
def stepwise(steps: int, *, every: Length = 0.3, factor: float = 0.1) -> Factor:
    """Multiply the rate by a factor after each interval. As StepLR."""
    stay = length(every, steps, "every")
    require(stay > 0, "every must be at least one step")
    _is_part(factor, "factor")
    return lambda step: factor ** (step // stay)


@schedule(
    "multi-step",
    options={"at": "when the rate falls: lengths from the start, such as 3e/6e", "factor": "factor for the rate"},
)
def multi_step(steps: int, *, at: Lengths = (0.5, 0.75), factor: float = 0.1) -> Factor:
    """Multiply the rate by a factor at each step in a list. As MultiStepLR."""
    _is_part(factor, "factor")
    places = [length(value, steps, "at") for value in at]
    return lambda step: factor ** sum(place <= step for place in places)


@schedule(
    "exponential",
    options={
        "every": f"how long it takes until the rate is multiplied by factor: {LENGTH}",
        "factor": "factor for the rate over the length every",
    },
)
def exponential(steps: int, *, every: Length = 0.3, factor: float = 0.1) -> Factor:
    """Decay exponentially, so that each interval multiplies the rate by a factor. As ExponentialLR for every=1."""
    stretch = _stretch(every, steps, "every")
    require(0 < factor <= 1, f"factor must be above 0 and at most 1, not {factor:g}")
    return lambda step: factor ** (step / stretch)


@schedule("polynomial", options={"power": "exponent; 1 is a straight line"})
def polynomial(steps: int, *, power: float = 1.0) -> Factor:
    """Decay to 0 in proportion to a power of the remaining steps. As PolynomialLR."""
    require(power > 0, f"power must be above 0, not {power:g}")
    return lambda step: max(1 - step / steps, 0.0) ** power


@schedule("linear", options={"final": FINAL})
def linear(steps: int, *, final: float = 0.0) -> Factor:
    """Change the rate linearly, down or up. As LinearLR with start_factor=1."""
    require(final >= 0, "final must not be negative")
    return lambda step: 1 + (final - 1) * min(step / steps, 1.0)


@schedule("cosine", options={"final": FINAL})
def cosine(steps: int, *, final: float = 0.0) -> Factor:
    """Decay along half a period of a cosine. As CosineAnnealingLR.

    Source: I. Loshchilov and F. Hutter, SGDR: stochastic gradient descent with warm restarts, ICLR 2017.
    """
    _is_part(final, "final")
    return lambda step: _between(1.0, final, step / steps)


@schedule(
    "cosine-restarts",
    options={
        "every": f"length of the first period: {LENGTH}",
        "growth": "length of each period, as a multiple of the one before",
        "final": FINAL,
    },
)
def cosine_restarts(steps: int, *, every: Length = 0.25, growth: int = 1, final: float = 0.0) -> Factor:
    """Decay along half a period of a cosine, and restart at the full rate. As CosineAnnealingWarmRestarts.

    Source: I. Loshchilov and F. Hutter, SGDR: stochastic gradient descent with warm restarts, ICLR 2017.
    """
    _is_part(final, "final")
    require(growth >= 1, f"growth must be at least 1, not {growth}")
    first = _stretch(every, steps, "every")

    def factor(step: int) -> float:
        period = first
        if growth == 1:
            step %= period
        while step >= period:
            step, period = step - period, period * growth
        return _between(1.0, final, step / period)

    return factor


@schedule(
    "cyclic",
    options={
        "start": "lowest rate, as a fraction of the highest",
        "rise": f"how long the rate rises: {LENGTH}",
        "fall": f"how long the rate falls; 0 means as long as rise: {LENGTH}",
        "halve": "halve the height of each cycle after the first",
        "factor": "factor for the height at each step",
        **CYCLED,
    },
)
def cyclic(
    steps: int, *, start: float = 0.1, rise: Length = 0.1, fall: Length = 0.0, halve: bool = False, factor: float = 1.0,
    cycle_momentum: bool = False, base_momentum: float = 0.8, max_momentum: float = 0.9,
) -> Factor:  # fmt: skip
    """Raise and lower the rate linearly in cycles. As CyclicLR, but cycle_momentum is off by default.

    The learning rate corresponds to CyclicLR's max_lr. CyclicLR's modes are available as options: triangular is the
    default, triangular2 is halve=true, and exp_range is a factor below 1.

    Source: L. N. Smith, Cyclical learning rates for training neural networks, WACV 2017.
    """
    _is_part(start, "start")
    require(0 < factor <= 1, f"factor must be above 0 and at most 1, not {factor:g}")
    up = _stretch(rise, steps, "rise")
    down = _stretch(fall, steps, "fall") if fall else up

    def height(step: int) -> float:
        cycle, place = divmod(step, up + down)
        share = place / up if place <= up else (up + down - place) / down
        return float(share * factor**step * (0.5**cycle if halve else 1.0))

    low, high = _momenta(cycle_momentum, (base_momentum, max_momentum), (0.8, 0.9))

    def rate(step: int) -> float:
        return start + (1 - start) * height(step)

    return Cycle(rate, lambda step: high - (high - low) * height(step)) if cycle_momentum else rate


@schedule(
    "one-cycle",
    options={
        "rise": "how long the rate rises, as a fraction of all steps",
        "start": "first rate, as a fraction of the peak",
        "final": "last rate, as a fraction of the peak",
        **CYCLED,
    },
)
def one_cycle(
    steps: int, *, rise: float = 0.3, start: float = 0.04, final: float = 4e-6,
    cycle_momentum: bool = False, base_momentum: float = 0.85, max_momentum: float = 0.95,
) -> Factor:  # fmt: skip
    """Rise to the learning rate and fall to almost 0, along cosines. As OneCycleLR without cycle_momentum by default.

    Source: L. N. Smith and N. Topin, Super-convergence, 2017.
    """
    for name, value in (("rise", rise), ("start", start), ("final", final)):
        _is_part(value, name)
    low, high = _momenta(cycle_momentum, (base_momentum, max_momentum), (0.85, 0.95))
    top, end = rise * steps - 1, steps - 1

    def along(step: int, first: float, peak: float, last: float) -> float:
        if step <= top:
            return _between(first, peak, step / top if top else 1.0)
        return _between(peak, last, (step - top) / (end - top) if end > top else 1.0)

    def factor(step: int) -> float:
        return along(step, start, 1.0, final)

    return Cycle(factor, lambda step: along(step, high, low, high)) if cycle_momentum else factor


def _momenta(cycled: bool, given: tuple[float, float], default: tuple[float, float]) -> tuple[float, float]:
    """Return the lowest and the highest momentum of a schedule, after checking them.

    Raises:
        UsageError: the values do not fit, or they are set although the momentum is not cycled.
    """
    low, high = given
    require(0 <= low <= high < 1, f"max_momentum must lie between `base_momentum` and 1, but is {high:g}")
    require(cycled or given == default, "base_momentum and `max_momentum` require cycle-momentum=true")
    return low, high


def _between(first: float, last: float, done: float) -> float:
    return last + (first - last) * (1 + math.cos(math.pi * min(done, 1.0))) / 2


@schedule(
    "plateau",
    watches=True,
    options={
        "factor": "factor for the rate",
        "patience": "number of validations without improvement before the rate falls",
        "threshold": "relative decrease of the loss that counts as an improvement",
        "cooldown": "number of validations after a fall that do not count",
        "final": "lowest rate, as a fraction of the first",
    },
)
class _Plateau:
    """Lower the rate if the validation loss stops falling. As ReduceLROnPlateau."""

    def __init__(
        self, steps: int, *, factor: float = 0.1, patience: int = 10, threshold: float = 1e-4, cooldown: int = 0,
        final: float = 0.0,
    ) -> None:  # fmt: skip
        for name, value in (("factor", factor), ("threshold", threshold), ("final", final)):
            _is_part(value, name)
        require(factor < 1, "factor must be below 1")
        require(patience >= 0 and cooldown >= 0, "patience and cooldown must not be negative")
        self._lower, self._patience, self._threshold = factor, patience, threshold
        self._cooldown, self._final = cooldown, final
        self._now: dict[str, Any] = {"factor": 1.0, "best": None, "worse": 0, "resting": 0}

    def __call__(self, step: int) -> float:
        return self._now["factor"]

    def observe(self, loss: float) -> None:
        now = self._now
        if loss < (math.inf if now["best"] is None else now["best"] * (1 - self._threshold)):
            now["best"], now["worse"] = loss, 0
        else:
            now["worse"] += 1
        if now["resting"]:
            now["resting"], now["worse"] = now["resting"] - 1, 0
        if now["worse"] > self._patience:
            now["factor"] = max(now["factor"] * self._lower, self._final)
            now["worse"], now["resting"] = 0, self._cooldown

    def state(self) -> dict[str, Any]:
        return dict(self._now)

    def restore(self, state: Mapping[str, Any]) -> None:
        numbers = [value for name, value in state.items() if name != "best" or value is not None]
        if not all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in numbers):
            message = "the checkpoint is damaged: its state of the schedule 'plateau' has values that are not numbers"
            raise unreadable(message, "use another copy of the checkpoint")
        self._now = dict(state)
