"""L-BFGS: its name and its settings. `onnxgrad train` runs it with scipy, outside of the training model."""

from __future__ import annotations

from typing import Any

from onnxgrad_cli.common.settings import declared, require
from onnxgrad_cli.optimizers.registry import Optimizer


def lbfgs(*, maxcor: int = 50, ftol: float = 0.0, gtol: float = 1e-8) -> dict[str, Any]:
    """L-BFGS with a line search, for `onnxgrad train` only: an epoch is one iteration on all samples.

    The settings are those of scipy.optimize.minimize(method='L-BFGS-B'). A learning rate does not apply.

    Source: D. C. Liu and J. Nocedal, On the limited memory BFGS method for large scale optimization, 1989.
    """
    require(maxcor >= 1, "maxcor must be at least 1")
    require(ftol >= 0 and gtol >= 0, "ftol and gtol must not be negative")
    return {"maxcor": maxcor, "ftol": ftol, "gtol": gtol}


SETTINGS = {
    "maxcor": "the number of past iterations in the history; each takes 16 bytes per trained parameter",
    "ftol": "the run ends if an iteration lowers the loss by at most this factor times max(loss, 1)",
    "gtol": "the run ends if no element of the gradient is larger",
}

LBFGS = Optimizer("lbfgs", lbfgs, {}, declared(lbfgs, SETTINGS, "optimizer 'lbfgs'"))
"""The optimizer L-BFGS, whose step reads all samples. It can't be part of a model, so it is not in `OPTIMIZERS`."""
