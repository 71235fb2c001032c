"""Parameter groups: optimizer options for those weights whose names match a pattern."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

from onnxgrad_cli import optimizers
from onnxgrad_cli.common.settings import pairs, unknown_setting
from onnxgrad_cli.errors import wrong_value
from onnxgrad_cli.metadata import StepGroup, StepSettings
from onnxgrad_cli.optimizers import Optimizer
from onnxgrad_cli.options import RATE, Group, OptimizerOptions
from onnxgrad_cli.passes.parameters.patterns import Known, matching


class Settings(NamedTuple):
    """The optimizer's options for one weight, and the factor by which its learning rate is multiplied."""

    options: dict[str, Any]
    factor: float = 1.0


def parse_group(text: str) -> Group:
    """Parse `GLOB:KEY=VALUE,...`. The glob ends at the last colon, because names may contain colons.

    Raises:
        UsageError: the text does not have this form.
    """
    pattern, _, rest = text.rpartition(":")
    found = pairs(rest, text, "GLOB:KEY=VALUE,KEY=VALUE") if pattern else {}
    if not found:
        raise wrong_value(
            f"`group`: '{text}' is not of the form GLOB:KEY=VALUE", "write, for example, '*.bias:weight-decay=0'"
        )
    return Group(pattern, found)


def settings(
    optimizer: Optimizer, options: OptimizerOptions, weights: Sequence[str], known: Known | None = None
) -> dict[str, Settings]:
    """Return the optimizer's settings for each weight. `known` maps weights to further names for them.

    Raises:
        UsageError: a group matches no weight, the optimizer has no such option, or a value has the wrong type.
    """
    given: dict[str, dict[str, Any]] = {weight: dict(options.optimizer_options) for weight in weights}
    takes = [*(option.name for option in optimizer.options), RATE]
    optimizer.settings(options.optimizer_options)
    for group in options.group:
        for name in group.options:
            if name not in takes:
                raise unknown_setting(f"`group` '{group}': {optimizer.name}", name, takes)
        for weight in members(group, weights, known):
            given[weight] |= group.options
    factors = {weight: each.pop(RATE, 1.0) for weight, each in given.items()}
    return {weight: Settings(optimizer.settings(each), factors[weight]) for weight, each in given.items()}


def members(group: Group, weights: Sequence[str], known: Known | None) -> list[str]:
    """Return the weights of a group.

    Raises:
        UsageError: the group contains no weight.
    """
    return list(matching(group.pattern, list(weights), "`group`", "trained weights", known))


def described(
    optimizer: Optimizer, options: OptimizerOptions, weights: Sequence[str], known: Known | None = None
) -> StepSettings | None:
    """Return a step's settings for the model's metadata, or None for an optimizer that onnxgrad does not define."""
    if not optimizer.function.__module__.startswith(f"{optimizers.__name__}."):
        return None
    groups = [StepGroup(tuple(members(group, weights, known)), _numbers(group.options)) for group in options.group]
    own = {option.name: option.default for option in optimizer.options}
    bounds = _numbers({name: getattr(options, name) for name in ("clip_norm", "clip_value", "ema")})
    return StepSettings(
        _numbers({**own, **options.optimizer_options}),
        tuple(groups),
        bounds.get("clip_norm"),
        bounds.get("clip_value"),
        int(options.accumulate),
        bounds.get("ema"),
    )


def _numbers(options: Mapping[str, object]) -> dict[str, float]:
    return {name: float(value) for name, value in options.items() if isinstance(value, Real)}
