"""onnxgrad turns an ONNX inference model into a training model of standard operators.

This package exports the names that users' programs import. A name is loaded when it is first used, so that the command
line starts without loading onnx. The classes of results are not exported. Import them from their own modules.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from onnxgrad_cli.common.lazy_names import lazy_names

if TYPE_CHECKING:  # type checkers can't read _NAMES, so the names are repeated here; a test compares both lists
    __version__: str
    from onnxgrad_cli.autodiff.registry import (
        all_rules as all_rules,
        definition as definition,
        lookup as lookup,
        no_gradient as no_gradient,
        refuse as refuse,
        rule as rule,
        scoped as scoped,
        stop_gradient as stop_gradient,
    )
    from onnxgrad_cli.builder import TrainingModel as TrainingModel, build as build
    from onnxgrad_cli.derivatives.kinds import derive as derive
    from onnxgrad_cli.emission.emitter import Op as Op
    from onnxgrad_cli.emission.values import Val as Val
    from onnxgrad_cli.errors import (
        CheckFailed as CheckFailed,
        OnnxgradError as OnnxgradError,
        Refusal as Refusal,
        Unknown as Unknown,
        UnsupportedError as UnsupportedError,
        UsageError as UsageError,
    )
    from onnxgrad_cli.explanations.method import Method as Method
    from onnxgrad_cli.jobs.artifact_folder import run_artifacts as run_artifacts
    from onnxgrad_cli.jobs.attack import run_attack as run_attack
    from onnxgrad_cli.jobs.build import run_build as run_build
    from onnxgrad_cli.jobs.check import run_check as run_check
    from onnxgrad_cli.jobs.derive import run_derive as run_derive
    from onnxgrad_cli.jobs.evaluate import run_evaluate as run_evaluate
    from onnxgrad_cli.jobs.expand import run_expand as run_expand
    from onnxgrad_cli.jobs.explain import run_explain as run_explain
    from onnxgrad_cli.jobs.export import run_export as run_export
    from onnxgrad_cli.jobs.inspect import inspect as inspect
    from onnxgrad_cli.jobs.pack import run_pack as run_pack
    from onnxgrad_cli.jobs.predict import run_predict as run_predict
    from onnxgrad_cli.jobs.train import run_train as run_train
    from onnxgrad_cli.jobs.tune import run_tune as run_tune
    from onnxgrad_cli.jobs.view import run_view as run_view
    from onnxgrad_cli.losses.registry import loss as loss
    from onnxgrad_cli.losses.spec import LossSpec as LossSpec
    from onnxgrad_cli.optimizers.registry import optimizer as optimizer
    from onnxgrad_cli.options import (
        Group as Group,
        LoraSpec as LoraSpec,
        Options as Options,
        RecomputeSpec as RecomputeSpec,
    )
    from onnxgrad_cli.options.attack import Fooling as Fooling
    from onnxgrad_cli.options.data import SampleOptions as SampleOptions
    from onnxgrad_cli.options.train import Course as Course
    from onnxgrad_cli.report.model import Report as Report
    from onnxgrad_cli.training.inference import Setting as Setting
    from onnxgrad_cli.training.metrics import metric as metric
    from onnxgrad_cli.training.run.watch import Judged as Judged, Stepped as Stepped
    from onnxgrad_cli.training.schedules import Schedule as Schedule, parse_schedule as parse_schedule
    from onnxgrad_cli.training.steps.base import NotFinite as NotFinite
    from onnxgrad_cli.training.trainer import Trainer as Trainer
    from onnxgrad_cli.verification.gradients.gradcheck import gradcheck as gradcheck

_NAMES = {
    "autodiff.registry": "all_rules definition lookup no_gradient refuse rule scoped stop_gradient",
    "builder": "TrainingModel build",
    "derivatives.kinds": "derive",
    "emission.emitter": "Op",
    "emission.values": "Val",
    "errors": "CheckFailed OnnxgradError Refusal Unknown UnsupportedError UsageError",
    "explanations.method": "Method",
    "jobs.artifact_folder": "run_artifacts",
    "jobs.attack": "run_attack",
    "jobs.build": "run_build",
    "jobs.check": "run_check",
    "jobs.derive": "run_derive",
    "jobs.evaluate": "run_evaluate",
    "jobs.expand": "run_expand",
    "jobs.explain": "run_explain",
    "jobs.export": "run_export",
    "jobs.inspect": "inspect",
    "jobs.pack": "run_pack",
    "jobs.predict": "run_predict",
    "jobs.train": "run_train",
    "jobs.tune": "run_tune",
    "jobs.view": "run_view",
    "losses.registry": "loss",
    "losses.spec": "LossSpec",
    "optimizers.registry": "optimizer",
    "options": "Group LoraSpec Options RecomputeSpec",
    "options.attack": "Fooling",
    "options.data": "SampleOptions",
    "options.train": "Course",
    "report.model": "Report",
    "training.inference": "Setting",
    "training.metrics": "metric",
    "training.run.watch": "Judged Stepped",
    "training.schedules": "Schedule parse_schedule",
    "training.steps.base": "NotFinite",
    "training.trainer": "Trainer",
    "verification.gradients.gradcheck": "gradcheck",
}
"""Module of this package -> the names that are exported from it, separated by spaces."""

_listed, _load = lazy_names(__name__, _NAMES)
__all__ = sorted([*_listed, "__version__"])

if not TYPE_CHECKING:  # otherwise type checkers would accept any name

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            return import_module("onnxgrad_cli.common.packages").tool_version()
        return _load(name)


def __dir__() -> list[str]:
    return __all__
