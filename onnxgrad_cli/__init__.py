"""onnxgrad turns an ONNX inference model into a training model, in standard operators.

The names below are loaded when they are first used, so that the command line starts without loading onnx.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from onnxgrad_cli.builder import TrainingModel, build
    from onnxgrad_cli.derivatives.classic import DerivativeOptions, onnx_derivative
    from onnxgrad_cli.derivatives.kinds import derive
    from onnxgrad_cli.derivatives.loss_output import add_loss_output, get_train_initializer
    from onnxgrad_cli.derivatives.random_feed import random_feed
    from onnxgrad_cli.errors import OnnxgradError
    from onnxgrad_cli.gradient_lists import gradient_definition
    from onnxgrad_cli.jobs.artifacts import LossType, OptimType, generate_artifacts
    from onnxgrad_cli.jobs.export import run_export
    from onnxgrad_cli.jobs.train import Course, Trained, run_train
    from onnxgrad_cli.pipeline import LossSpec, Options
    from onnxgrad_cli.proof.rulecheck import gradcheck
    from onnxgrad_cli.registry import (
        all_rules,
        definition,
        lookup,
        no_gradient,
        refuse,
        rule,
        scoped,
        stop_gradient,
    )
    from onnxgrad_cli.runtime.trainer import Trainer

_HOMES = {
    "Course": "jobs.train",
    "DerivativeOptions": "derivatives.classic",
    "LossSpec": "pipeline",
    "LossType": "jobs.artifacts",
    "OnnxgradError": "errors",
    "OptimType": "jobs.artifacts",
    "Options": "pipeline",
    "Trained": "jobs.train",
    "Trainer": "runtime.trainer",
    "TrainingModel": "builder",
    "add_loss_output": "derivatives.loss_output",
    "all_rules": "registry",
    "build": "builder",
    "definition": "registry",
    "derive": "derivatives.kinds",
    "generate_artifacts": "jobs.artifacts",
    "get_train_initializer": "derivatives.loss_output",
    "gradcheck": "proof.rulecheck",
    "gradient_definition": "gradient_lists",
    "lookup": "registry",
    "no_gradient": "registry",
    "onnx_derivative": "derivatives.classic",
    "random_feed": "derivatives.random_feed",
    "refuse": "registry",
    "rule": "registry",
    "run_export": "jobs.export",
    "run_train": "jobs.train",
    "scoped": "registry",
    "stop_gradient": "registry",
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
