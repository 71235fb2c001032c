"""onnxgrad turns an ONNX inference model into a training model, in standard operators.

The names below are loaded when they are first used, so that the command line starts without loading onnx.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names again, for type checkers; a test holds the two together
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
    from onnxgrad_cli.common.choices import (
        Derivative as Derivative,
        Init as Init,
        Mode as Mode,
        Preset as Preset,
        Quantization as Quantization,
        Recomputation as Recomputation,
        Reduction as Reduction,
        TargetName as TargetName,
        WeightsForm as WeightsForm,
        Yield as Yield,
    )
    from onnxgrad_cli.compat.artifacts import open_artifacts as open_artifacts, save_checkpoint as save_checkpoint
    from onnxgrad_cli.compat.generate_artifacts import (
        LossType as LossType,
        OptimType as OptimType,
        generate_artifacts as generate_artifacts,
    )
    from onnxgrad_cli.compat.gradient_lists import gradient_definition as gradient_definition
    from onnxgrad_cli.compat.loss_output import (
        add_loss_output as add_loss_output,
        get_train_initializer as get_train_initializer,
    )
    from onnxgrad_cli.compat.onnx_derivative import (
        DerivativeOptions as DerivativeOptions,
        onnx_derivative as onnx_derivative,
    )
    from onnxgrad_cli.compat.random_feed import random_feed as random_feed
    from onnxgrad_cli.derivatives.kinds import derive as derive
    from onnxgrad_cli.emission.emitter import Op as Op
    from onnxgrad_cli.emission.values import Val as Val
    from onnxgrad_cli.errors import (
        Caution as Caution,
        CheckFailed as CheckFailed,
        OnnxgradError as OnnxgradError,
        Refusal as Refusal,
        Unknown as Unknown,
        UnsupportedError as UnsupportedError,
        UsageError as UsageError,
    )
    from onnxgrad_cli.explanations.method import Method as Method
    from onnxgrad_cli.files import ModelSource as ModelSource
    from onnxgrad_cli.jobs.artifacts import run_artifacts as run_artifacts
    from onnxgrad_cli.jobs.attack import Fooled as Fooled, Fooling as Fooling, run_attack as run_attack
    from onnxgrad_cli.jobs.build import inspect as inspect, run_build as run_build
    from onnxgrad_cli.jobs.check import run_check as run_check
    from onnxgrad_cli.jobs.derive import run_derive as run_derive
    from onnxgrad_cli.jobs.doctor import doctor as doctor
    from onnxgrad_cli.jobs.evaluate import run_evaluate as run_evaluate
    from onnxgrad_cli.jobs.expand import run_expand as run_expand
    from onnxgrad_cli.jobs.explain import Explained as Explained, run_explain as run_explain
    from onnxgrad_cli.jobs.export import run_export as run_export
    from onnxgrad_cli.jobs.pack import run_pack as run_pack
    from onnxgrad_cli.jobs.predict import Predicted as Predicted, run_predict as run_predict
    from onnxgrad_cli.jobs.train import Course as Course, Trained as Trained, run_train as run_train
    from onnxgrad_cli.jobs.tune import run_tune as run_tune
    from onnxgrad_cli.jobs.verify_op import (
        Request as Request,
        Verification as Verification,
        run_verify_op as run_verify_op,
    )
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
    from onnxgrad_cli.record import Training as Training
    from onnxgrad_cli.report.model import Report as Report
    from onnxgrad_cli.training.data.sample_options import SampleOptions as SampleOptions
    from onnxgrad_cli.training.inference import Evaluated as Evaluated, Matrix as Matrix, Setting as Setting
    from onnxgrad_cli.training.metrics import metric as metric
    from onnxgrad_cli.training.run.watch import Judged as Judged, Stepped as Stepped
    from onnxgrad_cli.training.schedules import Schedule as Schedule, parse_schedule as parse_schedule
    from onnxgrad_cli.training.steps.base import NotFinite as NotFinite
    from onnxgrad_cli.training.trainer import Trainer as Trainer
    from onnxgrad_cli.verification.gradcheck import gradcheck as gradcheck
    from onnxgrad_cli.verification.verdict import Proof as Proof

_NAMES = {
    "autodiff.registry": "all_rules definition lookup no_gradient refuse rule scoped stop_gradient",
    "builder": "TrainingModel build",
    "common.choices": "Derivative Init Mode Preset Quantization Recomputation Reduction TargetName WeightsForm Yield",
    "compat.artifacts": "open_artifacts save_checkpoint",
    "compat.generate_artifacts": "LossType OptimType generate_artifacts",
    "compat.gradient_lists": "gradient_definition",
    "compat.loss_output": "add_loss_output get_train_initializer",
    "compat.onnx_derivative": "DerivativeOptions onnx_derivative",
    "compat.random_feed": "random_feed",
    "derivatives.kinds": "derive",
    "emission.emitter": "Op",
    "emission.values": "Val",
    "errors": "Caution CheckFailed OnnxgradError Refusal Unknown UnsupportedError UsageError",
    "explanations.method": "Method",
    "files": "ModelSource",
    "jobs.artifacts": "run_artifacts",
    "jobs.attack": "Fooled Fooling run_attack",
    "jobs.build": "inspect run_build",
    "jobs.check": "run_check",
    "jobs.derive": "run_derive",
    "jobs.doctor": "doctor",
    "jobs.evaluate": "run_evaluate",
    "jobs.expand": "run_expand",
    "jobs.explain": "Explained run_explain",
    "jobs.export": "run_export",
    "jobs.pack": "run_pack",
    "jobs.predict": "Predicted run_predict",
    "jobs.train": "Course Trained run_train",
    "jobs.tune": "run_tune",
    "jobs.verify_op": "Request Verification run_verify_op",
    "jobs.view": "run_view",
    "losses.registry": "loss",
    "losses.spec": "LossSpec",
    "optimizers.registry": "optimizer",
    "options": "Group LoraSpec Options RecomputeSpec",
    "record": "Training",
    "report.model": "Report",
    "training.data.sample_options": "SampleOptions",
    "training.inference": "Evaluated Matrix Setting",
    "training.metrics": "metric",
    "training.run.watch": "Judged Stepped",
    "training.schedules": "Schedule parse_schedule",
    "training.steps.base": "NotFinite",
    "training.trainer": "Trainer",
    "verification.gradcheck": "gradcheck",
    "verification.verdict": "Proof",
}
"""Module -> the names in it that users import from here."""

_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted([*_HOMES, "__version__"])


if not TYPE_CHECKING:  # else they would take any name for one of these

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            return _version()
        if name not in _HOMES:
            raise AttributeError(f"module 'onnxgrad_cli' has no attribute '{name}'")
        return getattr(import_module(f"onnxgrad_cli.{_HOMES[name]}"), name)


@cache  # the search for it reads folders, at each build
def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("onnxgrad")
    except metadata.PackageNotFoundError:
        return "unknown"  # a source tree that is not installed


def __dir__() -> list[str]:
    return __all__
