"""onnxgrad turns an ONNX inference model into a training model, in standard operators.

The names below are loaded when they are first used, so that the command line starts without loading onnx.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from onnxgrad_cli.autodiff.registry import (
        all_rules,
        definition,
        lookup,
        no_gradient,
        refuse,
        rule,
        scoped,
        stop_gradient,
    )
    from onnxgrad_cli.builder import TrainingModel, build
    from onnxgrad_cli.compat.generate_artifacts import LossType, OptimType, generate_artifacts
    from onnxgrad_cli.compat.gradient_lists import gradient_definition
    from onnxgrad_cli.compat.loss_output import add_loss_output, get_train_initializer
    from onnxgrad_cli.compat.onnx_derivative import DerivativeOptions, onnx_derivative
    from onnxgrad_cli.compat.random_feed import random_feed
    from onnxgrad_cli.derivatives.kinds import derive
    from onnxgrad_cli.errors import OnnxgradError
    from onnxgrad_cli.jobs.export import run_export
    from onnxgrad_cli.jobs.train import Course, Trained, run_train
    from onnxgrad_cli.losses.spec import LossSpec
    from onnxgrad_cli.options import Options
    from onnxgrad_cli.training.trainer import Trainer
    from onnxgrad_cli.verification.gradcheck import gradcheck

_HOMES = {
    "Course": "jobs.train",
    "DerivativeOptions": "compat.onnx_derivative",
    "LossSpec": "losses.spec",
    "LossType": "compat.generate_artifacts",
    "OnnxgradError": "errors",
    "OptimType": "compat.generate_artifacts",
    "Options": "options",
    "Trained": "jobs.train",
    "Trainer": "training.trainer",
    "TrainingModel": "builder",
    "add_loss_output": "compat.loss_output",
    "all_rules": "autodiff.registry",
    "build": "builder",
    "definition": "autodiff.registry",
    "derive": "derivatives.kinds",
    "generate_artifacts": "compat.generate_artifacts",
    "get_train_initializer": "compat.loss_output",
    "gradcheck": "verification.gradcheck",
    "gradient_definition": "compat.gradient_lists",
    "lookup": "autodiff.registry",
    "no_gradient": "autodiff.registry",
    "onnx_derivative": "compat.onnx_derivative",
    "random_feed": "compat.random_feed",
    "refuse": "autodiff.registry",
    "rule": "autodiff.registry",
    "run_export": "jobs.export",
    "run_train": "jobs.train",
    "scoped": "autodiff.registry",
    "stop_gradient": "autodiff.registry",
}

__all__ = [
    "Course",
    "DerivativeOptions",
    "LossSpec",
    "LossType",
    "OnnxgradError",
    "OptimType",
    "Options",
    "Trained",
    "Trainer",
    "TrainingModel",
    "__version__",
    "add_loss_output",
    "all_rules",
    "build",
    "definition",
    "derive",
    "generate_artifacts",
    "get_train_initializer",
    "gradcheck",
    "gradient_definition",
    "lookup",
    "no_gradient",
    "onnx_derivative",
    "random_feed",
    "refuse",
    "rule",
    "run_export",
    "run_train",
    "scoped",
    "stop_gradient",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _HOMES:
        raise AttributeError(f"module 'onnxgrad_cli' has no attribute '{name}'")
    return getattr(import_module(f"onnxgrad_cli.{_HOMES[name]}"), name)


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("onnxgrad")
    except metadata.PackageNotFoundError:
        return "unknown"  # a source tree that is not installed


def __dir__() -> list[str]:
    return __all__
