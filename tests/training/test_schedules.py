"""The schedules beside torch.optim.lr_scheduler: the same rate at each of 200 steps."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.training.schedules import SCHEDULES, Schedule, cycles_momentum, parse_schedule, schedule
from tests.facts import raises, raises_as

STEPS, BASE = 200, 0.3
Scheduler = Callable[[torch.optim.Optimizer], Any]


def torch_rates(make: Scheduler, base: float = BASE) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=base)
    scheduler, rates = make(optimizer), []
    for _ in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def after_warm_up(then: Scheduler, count: int, start: float) -> Scheduler:
    def make(optimizer: torch.optim.Optimizer) -> Any:
        rising = lr_scheduler.LinearLR(optimizer, start_factor=start, total_iters=count)
        return lr_scheduler.SequentialLR(optimizer, [rising, then(optimizer)], milestones=[count])

    return make


def cyclic(
    optimizer: torch.optim.Optimizer, start: float, up: int, down: int | None = None, mode: Any = "triangular",
    gamma: float = 1.0,
) -> Any:  # fmt: skip
    return lr_scheduler.CyclicLR(optimizer, start * BASE, BASE, up, down, mode, gamma, cycle_momentum=False)


PAIRS: dict[str, Scheduler] = {
    "constant": lambda o: lr_scheduler.ConstantLR(o, factor=1.0),
    "step:every=30,factor=0.5": lambda o: lr_scheduler.StepLR(o, 30, 0.5),
    "step:every=0.1": lambda o: lr_scheduler.StepLR(o, 20, 0.1),
    "step": lambda o: lr_scheduler.StepLR(o, 60, 0.1),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS),
    "cosine:final=0.01": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS, eta_min=0.01 * BASE),
    "linear": lambda o: lr_scheduler.LinearLR(o, 1.0, 0.0, STEPS),
    "linear:final=0.25": lambda o: lr_scheduler.LinearLR(o, 1.0, 0.25, STEPS),
    "one-cycle": lambda o: lr_scheduler.OneCycleLR(o, BASE, STEPS, cycle_momentum=False),
    "one-cycle:rise=0.125,start=0.1,final=0.001": lambda o: lr_scheduler.OneCycleLR(
        o, BASE, STEPS, pct_start=0.125, div_factor=10, final_div_factor=100, cycle_momentum=False
    ),
    "multi-step": lambda o: lr_scheduler.MultiStepLR(o, [100, 150]),
    "multi-step:at=10/0.5/170,factor=0.3": lambda o: lr_scheduler.MultiStepLR(o, [10, 100, 170], 0.3),
    "exponential:every=1,factor=0.99": lambda o: lr_scheduler.ExponentialLR(o, 0.99),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.1 ** (1 / 60)),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, STEPS),
    "polynomial:power=2.5": lambda o: lr_scheduler.PolynomialLR(o, STEPS, 2.5),
    "cosine-restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 50),
    "cosine-restarts:every=20,growth=2,final=0.1": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(
        o, 20, 2, 0.1 * BASE
    ),
    "cyclic": lambda o: cyclic(o, 0.1, 20),
    "cyclic:start=0.5,rise=30,fall=0.05,halve=true": lambda o: cyclic(o, 0.5, 30, 10, "triangular2"),
    "cyclic:rise=15,factor=0.99": lambda o: cyclic(o, 0.1, 15, None, "exp_range", 0.99),
    "constant:warmup=20": after_warm_up(lambda o: lr_scheduler.ConstantLR(o, factor=1.0), 20, 0.01),
    "linear:warmup=0.25,warmup-start=0.1": after_warm_up(lambda o: lr_scheduler.LinearLR(o, 1.0, 0.0, 150), 50, 0.1),
    "cosine:warmup=100,final=0.01": after_warm_up(
        lambda o: lr_scheduler.CosineAnnealingLR(o, 100, eta_min=0.01 * BASE), 100, 0.01
    ),
    "step:warmup=10,every=40,factor=0.3,warmup-start=0.5": after_warm_up(
        lambda o: lr_scheduler.StepLR(o, 40, 0.3), 10, 0.5
    ),
}


@pytest.mark.parametrize("text", PAIRS)
def test_is_torchs(text: str) -> None:
    ours = parse_schedule(text, BASE, STEPS)
    wanted = torch_rates(PAIRS[text])
    assert len(set(wanted)) > 1 or text == "constant"
    for step, rate in enumerate(wanted):
        assert ours.rate(step) == pytest.approx(rate, rel=1e-12, abs=1e-12), step


CYCLES: dict[str, Scheduler] = {
    "one-cycle:cycle-momentum=true": lambda o: lr_scheduler.OneCycleLR(o, BASE, STEPS),
    "one-cycle:rise=0.5,cycle-momentum=true,base-momentum=0,max-momentum=0.5": lambda o: lr_scheduler.OneCycleLR(
        o, BASE, STEPS, pct_start=0.5, base_momentum=0.0, max_momentum=0.5
    ),
    "cyclic:cycle-momentum=true": lambda o: lr_scheduler.CyclicLR(o, 0.1 * BASE, BASE, 20),
    "cyclic:rise=15,fall=10,halve=true,cycle-momentum=true,base-momentum=0.3": lambda o: lr_scheduler.CyclicLR(
        o, 0.1 * BASE, BASE, 15, 10, "triangular2", base_momentum=0.3
    ),
    "cyclic:factor=0.99,cycle-momentum=true": lambda o: lr_scheduler.CyclicLR(
        o, 0.1 * BASE, BASE, 20, None, "exp_range", 0.99
    ),
}


@pytest.mark.parametrize("text", CYCLES)
def test_the_momentum_is_torchs(text: str) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=BASE, momentum=0.7)
    scheduler, ours = CYCLES[text](optimizer), parse_schedule(text, BASE, STEPS)
    warm = parse_schedule(f"{text},warmup=20", BASE, STEPS + 20)
    assert cycles_momentum(text)
    for step in range(STEPS):
        group = optimizer.param_groups[0]
        assert ours.rate(step) == pytest.approx(group["lr"], rel=1e-12, abs=1e-12), step
        assert ours.momentum(step) == pytest.approx(group["momentum"], rel=1e-12, abs=1e-12), step
        assert warm.momentum(step + 20) == ours.momentum(step) and warm.momentum(step // 10) == ours.momentum(0)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("text", ["one-cycle", "cyclic:cycle-momentum=false", "cosine"])
def test_other_schedules_leave_the_momentum_alone(text: str) -> None:
    assert not cycles_momentum(text) and parse_schedule(text, BASE, STEPS).momentum(7) is None


@pytest.mark.parametrize(
    ("text", "alike"),
    [
        ("step:every=3e,factor=0.5", "step:every=60,factor=0.5"),
        ("cosine:warmup=1e,final=0.01", "cosine:warmup=20,final=0.01"),
        ("constant:warmup=0.5e", "constant:warmup=10"),
        ("constant:warmup=0e", "constant"),
        ("multi-step:at=5e/7.5e", "multi-step"),
    ],
)
def test_lengths_may_be_epochs(text: str, alike: str) -> None:
    """Epochs of 20 steps; as of StepLR that is stepped after each epoch."""
    ours, wanted = parse_schedule(text, BASE, STEPS, epoch=20), torch_rates(PAIRS[alike]) if alike in PAIRS else None
    same = parse_schedule(alike, BASE, STEPS)
    assert [ours.rate(step) for step in range(STEPS)] == [same.rate(step) for step in range(STEPS)]
    assert wanted is None or [ours.rate(step) for step in range(STEPS)] == pytest.approx(wanted, rel=1e-12)


def test_an_epoch_that_is_stepped_as_pytorchs_loops_step() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=BASE)
    scheduler, ours = lr_scheduler.StepLR(optimizer, 3, 0.5), parse_schedule("step:every=3e,factor=0.5", BASE, 200, 20)
    for step in range(STEPS):
        assert ours.rate(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
        optimizer.step()
        if step % 20 == 19:
            scheduler.step()


def test_epochs_that_nobody_knows_are_refused() -> None:
    with raises(UsageError, "missing_value", "3e") as refused:
        parse_schedule("step:every=3e", BASE, STEPS)
    assert refused.value.hint
    with pytest.raises(UsageError, match="a number"):
        parse_schedule("step:factor=3e", BASE, STEPS, 20)


LOSSES = [1 / (1 + step // 7) + (step * 37 % 13) / 5 for step in range(STEPS)]


@pytest.mark.parametrize(
    "text, settings",
    [
        ("plateau", {}),
        ("plateau:factor=0.5,patience=3", {"factor": 0.5, "patience": 3}),
        ("plateau:factor=0.7,patience=2,cooldown=4", {"factor": 0.7, "patience": 2, "cooldown": 4}),
        ("plateau:patience=1,threshold=0.2,final=0.001", {"patience": 1, "threshold": 0.2, "min_lr": 0.001 * BASE}),
        ("plateau:factor=0.9,patience=1,threshold=0.3", {"factor": 0.9, "patience": 1, "threshold": 0.3}),
        ("plateau:factor=0.9,patience=0,cooldown=1", {"factor": 0.9, "patience": 0, "cooldown": 1}),
    ],
)
def test_plateau_is_torchs_and_goes_on_from_its_state(text: str, settings: dict[str, Any]) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=BASE)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, eps=0, **settings)
    ours, seen = parse_schedule(text, BASE, STEPS), set()
    for step, loss in enumerate([math.nan, *LOSSES]):
        scheduler.step(loss)
        ours.observe(loss)
        assert ours.rate(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12, abs=1e-12), step
        seen.add(ours.rate(step))
        resumed = parse_schedule(text, BASE, STEPS)
        resumed.restore(json.loads(json.dumps(ours.state())))
        ours = resumed
    assert len(seen) > 1


def test_rates_stay_where_they_end() -> None:
    for text, last in (("cosine:final=0.1", 0.1), ("linear", 0.0), ("one-cycle", 4e-6), ("constant", 1.0)):
        ours = parse_schedule(text, 1.0, 10)
        assert [ours.rate(step) for step in (10, 11, 1000)] == pytest.approx([last] * 3, abs=1e-15)


@pytest.mark.parametrize("text", [f"{kind.name}:warmup=0.5" for kind in SCHEDULES] + [k.name for k in SCHEDULES])
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 7])
def test_short_runs(text: str, steps: int) -> None:
    try:
        ours = parse_schedule(text, 1.0, steps)
    except UsageError:
        assert steps < 2 or text.startswith("step")  # a part of them is no step at all
        return
    assert all(0 <= ours.rate(step) <= 1 and math.isfinite(ours.rate(step)) for step in range(steps + 2))


def test_a_warm_up_begins_at_a_hundredth_of_the_rate() -> None:
    rates = [parse_schedule("constant:warmup=10", 2.0, 100).rate(step) for step in range(12)]
    np.testing.assert_allclose(rates, [*np.linspace(0.02, 2, 11), 2])


def test_an_exponential_schedule_falls_to_a_tenth_in_three_tenths_of_a_run() -> None:
    ours = parse_schedule("exponential", 2.0, 100)
    np.testing.assert_allclose([ours.rate(step) for step in (0, 30, 60)], [2, 0.2, 0.02])


def test_the_shortest_runs() -> None:
    """As CosineAnnealingLR of one step; a run of none is like that of one."""
    weight = torch.nn.Parameter(torch.zeros(1))
    steps = torch.optim.SGD([weight], lr=0.5)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(steps, 1)
    steps.step()
    cosine.step()
    for count in (0, 1):
        ours = parse_schedule("cosine", 0.5, count)
        assert (ours.rate(0), ours.rate(1)) == (0.5, pytest.approx(cosine.get_last_lr()[0]))
    with pytest.raises(UsageError):
        parse_schedule("constant", 0.5, -1)


def test_what_watches_says_so() -> None:
    assert [kind.name for kind in SCHEDULES if kind.watches] == ["plateau"]
    cosine = parse_schedule("cosine", 1.0, 10)
    cosine.observe(3.0)
    assert cosine.state() == {} and not cosine.watches
    assert all(kind.summary for kind in SCHEDULES)


@pytest.mark.parametrize(
    "text, said",
    [
        ("cosin", ("unknown_name", "cosin")),
        ("cosine:finl=0.1", "no option 'finl'"),
        ("cosine:final", "KEY=VALUE"),
        ("cosine:final=low", "a number"),
        ("cosine:final=2", "between 0 and 1"),
        ("cosine:warmup=200", "fewer steps"),
        ("cosine:warmup=2.5", "warmup"),
        ("linear:warmup=-1", "warmup"),
        ("step:every=0", "every"),
        ("plateau:patience=-1", "negative"),
        ("plateau:factor=1", "below 1"),
        ("one-cycle:rise=1.5", "rise"),
        ("one-cycle:base-momentum=0.5", "option `base_momentum` and `max_momentum` require cycle-momentum=true"),
        ("cyclic:cycle-momentum=true,base-momentum=0.95", ("wrong_value", "max_momentum", "base_momentum", "1", "0.9")),
        ("one-cycle:cycle-momentum=true,max-momentum=1", ("wrong_value", "max_momentum", "base_momentum", "1", "1")),
        ("constant:warmup-begin=1", "no option `warmup_begin`"),
    ],
)
def test_refused(text: str, said: str | tuple[str, ...]) -> None:
    with raises_as(UsageError, said):
        parse_schedule(text, BASE, STEPS)


@pytest.mark.parametrize("base", [0.0, -1.0, math.nan, math.inf])
def test_a_rate_must_be_above_zero(base: float) -> None:
    with pytest.raises(UsageError, match="above 0"):
        parse_schedule("constant", base, STEPS)


def test_the_state_of_another_schedule_is_refused() -> None:
    with raises(OnnxgradError, "mismatch", "cosine"):
        parse_schedule("cosine", 1.0, 10).restore(parse_schedule("plateau", 1.0, 10).state())
    with raises(OnnxgradError, "mismatch", "plateau"):
        parse_schedule("plateau", 1.0, 10).restore({})


def test_a_schedule_of_ones_own() -> None:
    with SCHEDULES.scoped():

        @schedule("halves", options={"times": "how often"})
        def halves(steps: int, *, times: int = 3) -> Callable[[int], float]:
            return lambda step: 0.5 ** min(step, times)

        ours = parse_schedule("halves:times=2,warmup=4", 1.0, 10)
        assert isinstance(ours, Schedule)
        assert [ours.rate(step) for step in range(4, 9)] == [1, 0.5, 0.25, 0.25, 0.25]
        with raises(OnnxgradError, "conflict", "halves"):
            schedule("halves", options={"times": "how often"})(halves)
        schedule("cosine", override=True)(lambda steps: lambda step: 0.25)
        assert parse_schedule("cosine", 1.0, 10).rate(3) == 0.25
    assert parse_schedule("cosine", 1.0, 10).rate(0) == 1
    with pytest.raises(UsageError):
        SCHEDULES.lookup("halves")
