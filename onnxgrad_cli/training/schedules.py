"""How the learning rate changes from step to step: each schedule is a function of the step, as PyTorch has it.

A schedule has no state, so that a run which goes on at step 1000 has the rate of step 1000; only `plateau` remembers
the losses it saw.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from onnxgrad_cli.common import checks
from onnxgrad_cli.common.catalogue import Catalogue, Documented
from onnxgrad_cli.common.settings import Length, Lengths, Option, declared, exactly, require, spelled
from onnxgrad_cli.errors import OnnxgradError, UsageError

LENGTH = "steps, below 1 a part of them all, or epochs such as 3e"
FINAL = "what the rate ends at, as a part of the first"


Factor = Callable[[int], float]
"""From the number of steps that were done to what the learning rate is multiplied by."""


class Watcher(Protocol):
    """A schedule that goes by the loss: the factor it returns at a step follows from what it has observed."""

    def __call__(self, step: int) -> float:
        """The factor after `step` steps."""

    def observe(self, loss: float) -> None:
        """Take the loss of a validation."""

    def state(self) -> dict[str, Any]:
        """What it remembers; JSON can hold it."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Remember what `state` has given."""


@dataclass(frozen=True)
class Kind(Documented):
    """A kind of schedule.

    Attributes:
        name: what it is called on the command line.
        function: `function(steps, **options)` for a run of so many steps. It returns what gives, for the number of
            steps that were done, the factor of the learning rate.
        options: what it takes besides.
        watches: whether it goes by the loss of the validation; then `function` returns a `Watcher`.
    """

    name: str
    function: Callable[..., Any]
    options: tuple[Option, ...]
    watches: bool


SCHEDULES: Catalogue[Kind] = Catalogue("schedule", "schedules", [])
"""From the plain ones to those that go up and down."""


def schedule(
    name: str, *, options: Mapping[str, str] | None = None, watches: bool = False, override: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as a schedule; its keyword-only parameters are its options.

    Args:
        name, watches: see `Kind`.
        options: option -> what it does. Kinds and defaults are read from the function's signature.
        override: replace a schedule of this name instead of refusing.

    Raises:
        OnnxgradError: there is a schedule of this name, or an option is not documented.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        found = declared(function, options, f"schedule '{name}'")
        SCHEDULES.add(name, Kind(name, function, found, watches), override)
        return function

    return register


class Schedule:
    """The learning rate of each step of a run, with a warm-up before it where one was asked for.

    Attributes:
        kind: what it is.
        base: the learning rate that its factors multiply.
        steps: how many steps the run has, warm-up included.
        warmup: how many of them the rate goes up to where the schedule begins.
    """

    def __init__(
        self, kind: Kind, base: float, steps: int, options: Mapping[str, object] | None = None, epoch: int | None = None
    ) -> None:
        """Args:
        kind, base, steps: see above.
        options: those of its kind, and those of `warm_up`, by name; lengths may be epochs: '3e'.
        epoch: how many steps an epoch has, for such lengths.

        Raises:
            UsageError: an option is unknown or does not fit, or the rate is no positive number.
        """
        checks.of_type("kind", kind, Kind, "one of SCHEDULES, such as parse_schedule takes by name,")
        require(checks.is_number(base, 0.0) and base > 0, f"learning_rate must be above 0, not {base!r}")
        checks.at_least("steps", steps, 0, whole=True)
        given, before = in_steps({**(options or {})}, (*kind.options, *WARM_UP), epoch), {o.name for o in WARM_UP}
        warming = exactly(WARM_UP, {name: given.pop(name) for name in before & given.keys()}, "warm-up")
        self.kind, self.base, self.steps = kind, base, max(steps, 1)
        self.warmup, self._begin = warm_up(self.steps, **warming)
        self._factor = kind.function(max(self.steps - self.warmup, 1), **exactly(kind.options, given, kind.name))

    @property
    def watches(self) -> bool:
        """Whether it goes by the loss of the validation, which `observe` must then be given."""
        return self.kind.watches

    def rate(self, step: int) -> float:
        """The learning rate after `step` steps: 0 for the first."""
        if step >= self.warmup:
            return self.base * self._factor(step - self.warmup)
        return self.base * self._factor(0) * self._begin(step)

    def observe(self, loss: float) -> None:
        """Take the loss of a validation; most schedules do not care."""
        if self.watches:
            self._factor.observe(loss)

    def state(self) -> dict[str, Any]:
        """What it remembers of the losses it observed; JSON can hold it."""
        return self._factor.state() if self.watches else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` has given.

        Raises:
            OnnxgradError: it is the state of another schedule.
        """
        if set(state) != set(self.state()):
            raise OnnxgradError(f"this is not the state of the schedule '{self.kind.name}'", "keep to one schedule")
        if self.watches:
            self._factor.restore(state)


def parse_schedule(text: str, base: float, steps: int, epoch: int | None = None) -> Schedule:
    """Read `NAME[:KEY=VALUE,...]`, such as `cosine:warmup=100,final=0.01` or `step:every=3e,factor=0.5`.

    Args:
        text: a name of `SCHEDULES`, with options.
        base: the learning rate.
        steps: how many steps the run has.
        epoch: how many of them an epoch has, for lengths such as 3e.

    Raises:
        UsageError: there is no such schedule, or an option does not fit.
    """
    checks.text("schedule", text)
    name, options = spelled(text)
    return Schedule(SCHEDULES.lookup(name), base, steps, options, epoch)


def in_steps(given: dict[str, object], options: Iterable[Option], epoch: int | None) -> dict[str, object]:
    """Options with lengths in epochs, such as '3e', as numbers of steps.

    Raises:
        UsageError: nobody knows how many steps an epoch has.
    """
    for option in options:
        value = given.get(option.name)
        if option.kind in ("Length", "Lengths") and isinstance(value, str):
            parts = [_of_epochs(part, option.name, epoch) for part in value.split("/")]
            given[option.name] = parts[0] if option.kind == "Length" and len(parts) == 1 else "/".join(map(str, parts))
    return given


def _of_epochs(text: str, name: str, epoch: int | None) -> str | int:
    """Return a length in epochs as a number of steps, and any other text as it is."""
    found = re.fullmatch(r"(\d+\.?\d*)e", text)
    if found is None:
        return text
    if epoch is None:
        hint = "say how many steps an epoch has, or give steps"
        raise UsageError(f"option {name}: '{text}' is of epochs, and there are none here", hint)
    count = float(found[1])
    return max(round(count * epoch), 1) if count else 0


def length(value: float, steps: int, name: str) -> int:
    """A number of steps, given as such or, below 1, as a part of them all."""
    require(value >= 0 and (value < 1 or value == int(value)), f"{name} takes {LENGTH}, not {value:g}")
    return round(value * steps) if value < 1 else int(value)


def _stretch(value: float, steps: int, name: str) -> int:
    """Return a length of a step or more."""
    require(value > 0, f"{name} must be above 0, not {value:g}")
    return max(length(value, steps, name), 1)


def _is_part(value: float, name: str) -> None:
    require(0 <= value <= 1, f"{name} must lie between 0 and 1, not {value:g}")


def warm_up(steps: int, *, warmup: Length = 0.0, warmup_start: float = 0.01) -> tuple[int, Callable[[int], float]]:
    """The rate goes up in a straight line, before any schedule. As torch.optim.lr_scheduler's LinearLR."""
    count = length(warmup, steps, "warmup")
    require(count < steps or not count, f"warmup takes fewer steps than the run has, which is {steps}")
    _is_part(warmup_start, "warmup_start")
    return count, lambda step: warmup_start + (1 - warmup_start) * step / count


WARM_UP = declared(
    warm_up,
    {
        "warmup": f"how long the rate goes up before: {LENGTH}",
        "warmup_start": "where it begins, as a part of where it goes",
    },
    "warm-up",
)
"""The options that every schedule has besides its own."""


@schedule("constant")
def constant(steps: int) -> Factor:
    """The same rate at all steps."""
    return lambda step: 1.0


@schedule(
    "step",
    options={"every": f"how long the rate stays: {LENGTH}", "factor": "what it is then multiplied by"},
)
def stepwise(steps: int, *, every: Length = 0.3, factor: float = 0.1) -> Factor:
    """A rate that falls in steps. As StepLR."""
    stay = length(every, steps, "every")
    require(stay > 0, "every must be a step at least")
    _is_part(factor, "factor")
    return lambda step: factor ** (step // stay)


@schedule(
    "multi-step",
    options={"at": "when the rate falls: lengths from the beginning, as 3e/6e", "factor": "what it is multiplied by"},
)
def multi_step(steps: int, *, at: Lengths = (0.5, 0.75), factor: float = 0.1) -> Factor:
    """A rate that falls at given steps. As MultiStepLR."""
    _is_part(factor, "factor")
    places = [length(value, steps, "at") for value in at]
    return lambda step: factor ** sum(place <= step for place in places)


@schedule(
    "exponential",
    options={"every": f"the time in which the rate is multiplied by factor: {LENGTH}", "factor": "see every"},
)
def exponential(steps: int, *, every: Length = 0.3, factor: float = 0.1) -> Factor:
    """A rate that falls by the same share at each step. As ExponentialLR for every=1."""
    stretch = _stretch(every, steps, "every")
    require(0 < factor <= 1, f"factor must be above 0 and at most 1, not {factor:g}")
    return lambda step: factor ** (step / stretch)


@schedule("polynomial", options={"power": "the exponent; 1 is a straight line"})
def polynomial(steps: int, *, power: float = 1.0) -> Factor:
    """Down to 0 by a power of the steps that are left. As PolynomialLR."""
    require(power > 0, f"power must be above 0, not {power:g}")
    return lambda step: max(1 - step / steps, 0.0) ** power


@schedule("linear", options={"final": FINAL})
def linear(steps: int, *, final: float = 0.0) -> Factor:
    """A straight line down, or up. As LinearLR from 1."""
    require(final >= 0, "final must not be negative")
    return lambda step: 1 + (final - 1) * min(step / steps, 1.0)


@schedule("cosine", options={"final": FINAL})
def cosine(steps: int, *, final: float = 0.0) -> Factor:
    """Half a period of a cosine, down. As CosineAnnealingLR.

    Source: I. Loshchilov and F. Hutter, SGDR: stochastic gradient descent with warm restarts, ICLR 2017.
    """
    _is_part(final, "final")
    return lambda step: _between(1.0, final, step / steps)


@schedule(
    "cosine-restarts",
    options={
        "every": f"the steps before the first restart: {LENGTH}",
        "growth": "how many times as long each period is as the one before it",
        "final": FINAL,
    },
)
def cosine_restarts(steps: int, *, every: Length = 0.25, growth: int = 1, final: float = 0.0) -> Factor:
    """Half periods of a cosine, each from the full rate down. As CosineAnnealingWarmRestarts.

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
        "start": "the lowest rate, as a part of the highest",
        "rise": f"how long the rate goes up: {LENGTH}",
        "fall": f"how long it goes down; 0 is as long as rise: {LENGTH}",
        "halve": "halve the height of each cycle after the first",
        "factor": "what the height is multiplied by at each step",
    },
)
def cyclic(
    steps: int, *, start: float = 0.1, rise: Length = 0.1, fall: Length = 0.0, halve: bool = False, factor: float = 1.0
) -> Factor:
    """Up and down in straight lines, again and again. As CyclicLR with cycle_momentum=False.

    Its max_lr is the learning rate. Its modes are triangular, triangular2 (halve=true) and exp_range (factor below 1).

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

    return lambda step: start + (1 - start) * height(step)


@schedule(
    "one-cycle",
    options={
        "rise": "how long the rate goes up, as a part of all steps",
        "start": "where it begins, as a part of its peak",
        "final": "where it ends, as a part of its peak",
    },
)
def one_cycle(steps: int, *, rise: float = 0.3, start: float = 0.04, final: float = 4e-6) -> Factor:
    """Up to the learning rate and down to nearly nothing, in cosines. As OneCycleLR with cycle_momentum=False.

    Source: L. N. Smith and N. Topin, Super-convergence, 2017.
    """
    for name, value in (("rise", rise), ("start", start), ("final", final)):
        _is_part(value, name)
    top, end = rise * steps - 1, steps - 1

    def factor(step: int) -> float:
        if step <= top:
            return _between(start, 1.0, step / top if top else 1.0)
        return _between(1.0, final, (step - top) / (end - top) if end > top else 1.0)

    return factor


def _between(first: float, last: float, done: float) -> float:
    return last + (first - last) * (1 + math.cos(math.pi * min(done, 1.0))) / 2


@schedule(
    "plateau",
    watches=True,
    options={
        "factor": "what the rate is multiplied by",
        "patience": "how many validations in a row may be no better before it is",
        "threshold": "how much less, as a part, a loss must be to be better",
        "cooldown": "how many validations after that do not count",
        "final": "what the rate does not go below, as a part of the first",
    },
)
class _Plateau:
    """Lower when the loss of the validation no longer falls. As ReduceLROnPlateau."""

    def __init__(
        self,
        steps: int,
        *,
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 1e-4,
        cooldown: int = 0,
        final: float = 0.0,
    ) -> None:
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
            raise OnnxgradError("this is not the state of the schedule 'plateau'", "the checkpoint is damaged")
        self._now = dict(state)
