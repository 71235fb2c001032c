"""The moving averages of weights (EMA) in place of the weights: `--use-ema` evaluates and writes them.

A run and its checkpoint are asked the same, and refused for the same reasons.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from onnxgrad_cli.errors import UsageError


def check_ema(ema: Mapping[str, str], values: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Make sure that moving averages can stand in place of the weights.

    Args:
        ema: weight -> the state with its moving average, as `Roles.averages` has them.
        values: weights and state, by name.

    Returns:
        A copy of `ema`.

    Raises:
        UsageError: there are none, or one is of another type than its weight.
    """
    if not ema:
        raise UsageError("`use_ema`: no averages are kept", "train with `ema=DECAY`, such as 0.999")
    for name, average in ema.items():
        if name not in values or average not in values:
            raise UsageError(f"`use_ema`: there is no '{name}' with an average '{average}'", "leave `use_ema` out")
        if values[name].dtype != values[average].dtype:
            raise UsageError(
                f"`use_ema`: '{name}' is {values[name].dtype}, its average {values[average].dtype}",
                "leave `use_ema` out",
            )
    return dict(ema)
