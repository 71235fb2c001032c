"""Interfaces of older systems: `onnx_derivative`, gradient lists, and the artifacts of onnxruntime-training.

The modules are imported when one of their names is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnxgrad_cli.common.lazy_names import lazy_names

if TYPE_CHECKING:  # type checkers can't read _NAMES, so the names are repeated here; a test compares both lists
    from onnxgrad_cli.compat.artifacts import (
        LossType as LossType,
        OptimType as OptimType,
        generate_artifacts as generate_artifacts,
        open_artifacts as open_artifacts,
        save_checkpoint as save_checkpoint,
    )
    from onnxgrad_cli.compat.derivative_options import (
        DerivativeOptions as DerivativeOptions,
        onnx_derivative as onnx_derivative,
    )
    from onnxgrad_cli.compat.gradient_lists import gradient_definition as gradient_definition
    from onnxgrad_cli.compat.loss_output import (
        add_loss_output as add_loss_output,
        get_train_initializer as get_train_initializer,
    )
    from onnxgrad_cli.compat.random_feeds import random_feed as random_feed

_NAMES = {
    "compat.artifacts": "LossType OptimType generate_artifacts open_artifacts save_checkpoint",
    "compat.gradient_lists": "gradient_definition",
    "compat.loss_output": "add_loss_output get_train_initializer",
    "compat.derivative_options": "DerivativeOptions onnx_derivative",
    "compat.random_feeds": "random_feed",
}
"""Module -> the names that this package exports from it, separated by spaces."""

__all__, _load = lazy_names(__name__, _NAMES)

if not TYPE_CHECKING:  # for a type checker, __getattr__ would make any name valid
    __getattr__ = _load
