"""What a user writes: the whole of the public face, for the type checkers alone; it is never run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import ModelProto

from onnxgrad_cli import (
    CheckFailed,
    Course,
    Group,
    LoraSpec,
    LossSpec,
    ModelSource,
    OnnxgradError,
    Op,
    Options,
    RecomputeSpec,
    Refusal,
    Report,
    Trained,
    Trainer,
    TrainingModel,
    Unknown,
    UnsupportedError,
    UsageError,
    Val,
    build,
    definition,
    derive,
    gradcheck,
    inspect,
    loss,
    no_gradient,
    optimizer,
    random_feed,
    refuse,
    rule,
    run_build,
    run_check,
    run_derive,
    run_expand,
    run_export,
    run_train,
    run_tune,
    run_verify_op,
    run_view,
    stop_gradient,
)


@rule("Squareplus", domain="my.ops")
def squareplus(op: Op, g: Val, y: Val, x: Val, *, b: float = 4.0) -> Val:
    if x.known_shape is None:
        raise Unknown("its shape is unknown")
    root: Val = op.Sqrt(x * x + b)  # operators may have several outputs, so that it is to say what this one returns
    return g * (1 + x / root) / 2


@definition("Halved", domain="my.ops")
def halved(op: Op, x: Val) -> Val:
    return x / 2


@loss("quartic")
def quartic(op: Op, prediction: Val, label: Val) -> Val:
    """The fourth power of the distance."""
    return (prediction - label) ** 4.0


no_gradient("Rounded", domain="my.ops")
refuse("Drawn", "it draws numbers", "freeze it", domain="my.ops")
stop_gradient("Looked", [1], domain="my.ops")
decorator = optimizer("mine", slots={"m": "the mean"})


def options(weight: float) -> Options:
    return Options(
        losses=(LossSpec("mse"), LossSpec("mae", "y", "target", weight)),
        reduction="sum",
        train=("*.bias",),
        preset=("head", "norm"),
        lora=LoraSpec(8, 16.0),
        optimizer="adamw",
        optimizer_options={"weight_decay": 0.01},
        group=(Group("*.bias", {"weight_decay": 0.0}),),
        loss_scale="dynamic",
        recompute=RecomputeSpec("budget", size=1 << 20),
        yield_="ones",
        mode="train",
        target="ort-cpu",
        dims={"batch": 4},
        shapes={"x": (4, "n")},
    )


def trained(model: ModelSource, batches: list[dict[str, np.ndarray]]) -> list[float]:
    built: TrainingModel = build(model, options(0.5))
    trainer = Trainer(built, threads=1)
    losses: list[float] = [trainer.step(batch, learning_rate=1e-3) for batch in batches]
    gradient: str = built.training.gradients["w"]
    reasons: dict[str, str] = built.training.not_trained
    print(gradient, reasons, built.options.mode, [each.text for each in built.training.cautions])
    trainer.save("trained.onnx", "model.onnx")
    return losses


def jobs(file: Path) -> None:
    report: Report = run_build(file, "train.onnx", options(1.0), verify=True)
    print(report.status, inspect(file).verdict, run_check("train.onnx").status)
    run: Trained = run_train(file, "data.npz", options=Options(), course=Course(epochs=3, init="he"))
    print(run.best, run_export(Path("run/best"), file), run_expand(file), run_derive(file, kind="jvp")[1])
    print(run_tune(file)[1], run_verify_op("Gemm").passed, run_view(file, kind="svg")[1])


def derivatives(model: ModelProto) -> float:
    hessian: ModelProto = derive(model.SerializeToString(), "hessian", wrt="x", cotangents="input")
    feed: dict[str, np.ndarray] = random_feed(hessian, seed=0)
    return gradcheck(model, feed, order=2)


def told(model: str) -> str:
    try:
        build(model)
    except UnsupportedError as error:
        refusals: tuple[Refusal, ...] = error.refusals
        return "; ".join(f"{each.node}: {each.reason}" for each in refusals)
    except (UsageError, CheckFailed) as error:
        return f"{error.message} ({error.hint})"
    except OnnxgradError as error:
        return str(error.exit_code)
    return ""
