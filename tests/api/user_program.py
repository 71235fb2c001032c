"""What a user writes: the whole of the public face, for the type checkers alone; it is never run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import ModelProto

from onnxgrad_cli import (
    CheckFailed,
    Course,
    Fooling,
    Group,
    Judged,
    LoraSpec,
    LossSpec,
    Method,
    NotFinite,
    OnnxgradError,
    Op,
    Options,
    RecomputeSpec,
    Refusal,
    Report,
    SampleOptions,
    Schedule,
    Setting,
    Stepped,
    Trainer,
    TrainingModel,
    Unknown,
    UnsupportedError,
    UsageError,
    Val,
    __version__,
    all_rules,
    build,
    definition,
    derive,
    gradcheck,
    inspect,
    lookup,
    loss,
    metric,
    no_gradient,
    optimizer,
    parse_schedule,
    refuse,
    rule,
    run_artifacts,
    run_attack,
    run_build,
    run_check,
    run_derive,
    run_evaluate,
    run_expand,
    run_explain,
    run_export,
    run_pack,
    run_predict,
    run_train,
    run_tune,
    run_view,
    scoped,
    stop_gradient,
)
from onnxgrad_cli.compat import random_feed


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


@metric("furthest", higher=False)
class Furthest:
    """The largest distance of a prediction from its label."""

    def __init__(self) -> None:
        self.largest = float("nan")

    def update(self, predictions: np.ndarray, labels: np.ndarray) -> None:
        self.largest = float(np.fmax(self.largest, np.abs(predictions - labels).max()))

    def value(self) -> float:
        return self.largest


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


def trained(model: ModelProto, batches: list[dict[str, np.ndarray]]) -> list[float]:
    built: TrainingModel = build(model, options(0.5))
    trainer = Trainer(built, threads=1)
    schedule: Schedule = parse_schedule("cosine:warmup=10", 1e-3, len(batches))
    try:
        losses: list[float] = [trainer.step(batch, learning_rate=schedule.rate(i)) for i, batch in enumerate(batches)]
    except NotFinite:
        return []
    gradient: str = built.training.gradients["w"]
    reasons: dict[str, str] = built.training.not_trained
    print(gradient, reasons, built.options.mode, [each.text for each in built.training.cautions])
    trainer.save("trained.onnx", "model.onnx")
    return losses


def told_while_training(event: object) -> None:
    if isinstance(event, Stepped):
        print(event.step, event.loss)
    elif isinstance(event, Judged):
        print(event.epoch, event.results)


def jobs(file: Path) -> None:
    report: Report = run_build(file, "train.onnx", options(1.0), verify=True)
    print(__version__, report.status, inspect(file).verdict, run_check("train.onnx").status)
    course = Course(epochs=3, init="he", samples=SampleOptions(balance=True))
    run = run_train(file, "data.npz", options=Options(), course=course, watch=told_while_training)
    print(run.best, run_export(Path("run/best"), file), run_expand(file), run_derive(file, kind="jvp")[1])
    print(run_tune(file)[1], run_view(file, form="dot")[1], run_pack("train.onnx", "site", data="data.npz"))
    artifacts: Report = run_artifacts(file, "artifacts", options(1.0))
    print(artifacts.status)


def use(file: Path, images: np.ndarray) -> None:
    setting = Setting(batch_size=8, samples=SampleOptions())
    print(run_evaluate(file, {"x": images, "y": images}, metrics=["furthest"], setting=setting))
    print(run_predict(file, {"x": images}, setting=setting))
    print(run_explain(file, "data.npz", method=Method("occlusion", window=(3, 3))))
    print(run_attack(file, "data.npz", fooling=Fooling("pgd", epsilon=0.1)))


def rules() -> list[str]:
    with scoped():
        no_gradient("Rounded", domain="my.ops")
        found = lookup("Rounded", "my.ops")
    return [each.op_type for each in all_rules() if each is not found]


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
