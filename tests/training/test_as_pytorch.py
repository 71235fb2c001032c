"""The command `train` beside PyTorch's loop: the same weights, running statistics and losses after two epochs.

Each table pairs arguments of the command with the settings of a loop in PyTorch. The loop shares no code with onnxgrad;
it sees the samples in the order of the run. All rows run in float32 and float64, then random combinations of rows.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn, optim
from torch.nn import functional as F
from torch.optim import lr_scheduler

from tests.cli_harness import Shell
from tests.steps import NAdam

TRAINING, VALIDATION, BATCH, EPOCHS, RATE = 45, 21, 8, 2, 0.02
TOLERANCE = {"float32": 1e-6, "float64": 1e-11}
"""The largest difference of a tensor, relative to its largest magnitude or 1, and of a loss, relative to it.

Some optimizers enlarge rounding errors, such as a centered RMSprop, which subtracts squares. If the difference to a
float32 run is larger, the run is compared with PyTorch's in float64, which has hardly any rounding errors.
"""

COMBINATIONS = 100
HEADS = {"plain": nn.Identity, "sigmoid": nn.Sigmoid, "softmax": lambda: nn.Softmax(1), "log": lambda: nn.LogSoftmax(1)}
CLASS_WEIGHTS = [1.0, 2.0, 0.5]
IGNORED = -100

Settings = dict[str, Any]
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Row:
    """Arguments of the command, and the settings that have the same effect on the loop of this module."""

    arguments: tuple[object, ...] = ()
    settings: Settings = field(default_factory=dict)


def row(*arguments: object, **settings: Any) -> Row:
    return Row(arguments, settings)


# -- the tables ---------------------------------------------------------------------------------------------------


def options(**given: object) -> list[object]:
    return [
        part for name, value in given.items() for part in ("--optimizer-option", f"{name.replace('_', '-')}={value}")
    ]


def by(name: str, make: Callable[..., optim.Optimizer], ours: Settings | None = None, **theirs: Any) -> Row:
    """An optimizer whose options are called alike, unless `ours` calls them otherwise."""
    given = theirs if ours is None else ours
    return row("--optimizer", name, *options(**given), optimizer=lambda groups, rate: make(groups, lr=rate, **theirs))


OPTIMIZERS = {
    "sgd": by("sgd", optim.SGD),
    "sgd decay": by("sgd", optim.SGD, weight_decay=0.1),
    "momentum": by("momentum", optim.SGD, {}, momentum=0.9),
    "momentum dampened": by(
        "momentum", optim.SGD, momentum=0.8, dampening=0.3, weight_decay=0.1),
    "nesterov": by("nesterov", optim.SGD, {"momentum": 0.8, "weight_decay": 0.1},
                   momentum=0.8, weight_decay=0.1, nesterov=True),
    "rmsprop": by("rmsprop", optim.RMSprop),
    "rmsprop centered": by("rmsprop", optim.RMSprop, centered=True, momentum=0.5, eps=1e-3, weight_decay=0.1),
    "adagrad": by("adagrad", optim.Adagrad),
    "adagrad decay": by("adagrad", optim.Adagrad, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.1),
    "adam": by("adam", optim.Adam),
    "adam amsgrad": by("adam", optim.Adam, {"beta1": 0.8, "beta2": 0.95, "weight_decay": 0.1, "amsgrad": True},
                       betas=(0.8, 0.95), weight_decay=0.1, amsgrad=True),
    "adamw": by("adamw", optim.AdamW),
    "adamw decay": by("adamw", optim.AdamW, weight_decay=0.3, eps=1e-4),
    "adamax": by("adamax", optim.Adamax),
    "adamax decay": by("adamax", optim.Adamax, {"beta1": 0.8, "beta2": 0.95, "weight_decay": 0.1},
                       betas=(0.8, 0.95), weight_decay=0.1),
    "nadam": by("nadam", NAdam),
    "nadam decay": by("nadam", NAdam,
                      {"beta1": 0.8, "beta2": 0.95, "momentum_decay": 0.1, "weight_decay": 0.1},
                      betas=(0.8, 0.95), momentum_decay=0.1, weight_decay=0.1),
    "radam": by("radam", optim.RAdam),
    "radam decay": by("radam", optim.RAdam, {"beta1": 0.8, "beta2": 0.95, "weight_decay": 0.1},
                      betas=(0.8, 0.95), weight_decay=0.1),
    "adadelta": by("adadelta", optim.Adadelta),
    "adadelta decay": by("adadelta", optim.Adadelta, rho=0.8, eps=1e-3, weight_decay=0.1),
}  # fmt: skip


def scheduled(text: str, make: Callable[..., Any]) -> Row:
    """A schedule; `make(optimizer, steps, epoch)` is PyTorch's, for so many steps in all and in an epoch."""
    return row("--schedule", text, schedule=make)


def after_warm_up(then: Callable[..., Any], count: int) -> Callable[..., Any]:
    def make(optimizer: optim.Optimizer, steps: int, epoch: int) -> Any:
        rising = lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=count)
        following = then(optimizer, steps, epoch)
        return lr_scheduler.SequentialLR(optimizer, [rising, following], milestones=[count])

    return make


def one_cycle(optimizer: optim.Optimizer, steps: int, epoch: int) -> Any:
    peaks = [group["lr"] for group in optimizer.param_groups]
    return lr_scheduler.OneCycleLR(optimizer, peaks, steps, cycle_momentum=False)


def cyclic(optimizer: optim.Optimizer, steps: int, epoch: int) -> Any:
    peaks = [group["lr"] for group in optimizer.param_groups]
    return lr_scheduler.CyclicLR(
        optimizer, [0.2 * peak for peak in peaks], peaks, 3, 2, "triangular2", cycle_momentum=False
    )


def one_cycle_with_momentum(optimizer: optim.Optimizer, steps: int, epoch: int) -> Any:
    peaks = [group["lr"] for group in optimizer.param_groups]
    return lr_scheduler.OneCycleLR(optimizer, peaks, steps)


def cyclic_with_momentum(optimizer: optim.Optimizer, steps: int, epoch: int) -> Any:
    peaks = [group["lr"] for group in optimizer.param_groups]
    return lr_scheduler.CyclicLR(
        optimizer, [0.1 * peak for peak in peaks], peaks, 3, 2, base_momentum=0.5, max_momentum=0.95
    )


SCHEDULES = {
    "constant": scheduled("constant", lambda o, steps, _: lr_scheduler.ConstantLR(o, 1.0)),
    "step": scheduled("step:every=3,factor=0.5", lambda o, steps, _: lr_scheduler.StepLR(o, 3, 0.5)),
    "step of an epoch": scheduled("step:every=1e,factor=0.5", lambda o, _, epoch: lr_scheduler.StepLR(o, epoch, 0.5)),
    "linear": scheduled("linear:final=0.1", lambda o, steps, _: lr_scheduler.LinearLR(o, 1.0, 0.1, steps)),
    "cosine": scheduled("cosine", lambda o, steps, _: lr_scheduler.CosineAnnealingLR(o, steps)),
    "cosine after a warm-up": scheduled(
        "cosine:warmup=4",
        after_warm_up(lambda o, steps, _: lr_scheduler.CosineAnnealingLR(o, steps - 4), 4),
    ),
    "multi-step": scheduled(
        "multi-step:at=3/1e/8,factor=0.5", lambda o, _, epoch: lr_scheduler.MultiStepLR(o, [3, epoch, 8], 0.5)
    ),
    "exponential": scheduled("exponential:every=1,factor=0.8", lambda o, steps, _: lr_scheduler.ExponentialLR(o, 0.8)),
    "polynomial": scheduled("polynomial:power=2", lambda o, steps, _: lr_scheduler.PolynomialLR(o, steps, 2.0)),
    "cosine with restarts": scheduled(
        "cosine-restarts:every=2,growth=2", lambda o, *_: lr_scheduler.CosineAnnealingWarmRestarts(o, 2, 2)
    ),
    "cyclic": scheduled("cyclic:start=0.2,rise=3,fall=2,halve=true", cyclic),
    "one-cycle": scheduled("one-cycle", one_cycle),
    "plateau": row(
        "--schedule", "plateau:patience=0,threshold=0.5,factor=0.5",
        plateau=lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.5, factor=0.5, eps=0),
    ),
}  # fmt: skip


def judged(text: str, labels: str, make: Callable[..., Any], head: str = "plain", **more: object) -> Row:
    """A loss; `make(reduction=...)` is PyTorch's."""
    given = [part for name, value in more.items() for part in ("--loss-option", f"{name.replace('_', '-')}={value}")]
    table = CLASS_WEIGHTS if "class_weights" in more else [1.0] * len(CLASS_WEIGHTS)
    return row("--loss", text, *given, loss=make, labels=labels, head=head, counted=table)


def elastic(reduction: str) -> Callable[..., torch.Tensor]:
    return lambda p, y: 0.3 * F.l1_loss(p, y, reduction=reduction) + 0.7 * F.mse_loss(p, y, reduction=reduction)


def cosine(reduction: str) -> Callable[..., torch.Tensor]:
    return lambda p, y: getattr(1 - F.cosine_similarity(p, y, -1), reduction)()


def of_probabilities(reduction: str) -> Callable[..., torch.Tensor]:
    return lambda p, y: F.nll_loss(p.log(), y, reduction=reduction)


def weighted(make: Callable[..., Any]) -> Callable[..., Any]:
    return lambda reduction: (
        lambda p, y: make(weight=torch.tensor(CLASS_WEIGHTS, dtype=p.dtype), reduction=reduction)(p, y)
    )


LOSSES = {
    "mse": judged("mse", "numbers", nn.MSELoss),
    "mae": judged("mae", "numbers", nn.L1Loss),
    "huber": judged("huber", "numbers", lambda **r: nn.HuberLoss(delta=0.5, **r), delta=0.5),
    "smooth-l1": judged("smooth-l1", "numbers", lambda **r: nn.SmoothL1Loss(beta=0.5, **r), beta=0.5),
    "elastic": judged("elastic", "numbers", elastic, l1_ratio=0.3),
    "bce": judged("bce", "shares", nn.BCELoss, "sigmoid"),
    "bce-logits": judged("bce-logits", "shares", nn.BCEWithLogitsLoss),
    "bce-logits positive": judged("bce-logits", "shares", lambda **r: lambda p, y: F.binary_cross_entropy_with_logits(
        p, y, pos_weight=torch.tensor(2.0, dtype=p.dtype), **r), pos_weight=2.0),
    "kl-div": judged("kl-div", "shares", nn.KLDivLoss, "log"),
    "kl-div of samples": judged(
        "kl-div", "shares", lambda reduction: nn.KLDivLoss(reduction="batchmean" if reduction == "mean" else "sum"),
        "log", batchmean="true"),
    "poisson-nll": judged("poisson-nll", "counts", nn.PoissonNLLLoss),
    "poisson-nll full": judged("poisson-nll", "counts", lambda **r: nn.PoissonNLLLoss(full=True, **r), full="true"),
    "cosine": judged("cosine", "numbers", cosine),
    "cross-entropy": judged("cross-entropy", "classes", nn.CrossEntropyLoss),
    "cross-entropy smoothed": judged("cross-entropy", "classes",
                                     lambda **r: nn.CrossEntropyLoss(label_smoothing=0.1, **r), label_smoothing=0.1),
    "cross-entropy weighted": judged("cross-entropy", "classes", weighted(nn.CrossEntropyLoss),
                                     class_weights="weights.npy"),
    "cross-entropy ignoring": judged("cross-entropy", "ignored", nn.CrossEntropyLoss),
    "soft-cross-entropy": judged("soft-cross-entropy", "shares", nn.CrossEntropyLoss),
    "soft-cross-entropy smoothed": judged(
        "soft-cross-entropy", "shares", lambda **r: lambda p, y: nn.CrossEntropyLoss(
            torch.tensor(CLASS_WEIGHTS, dtype=p.dtype), label_smoothing=0.1, **r)(p, y),
        class_weights="weights.npy", label_smoothing=0.1),
    "nll": judged("nll", "classes", nn.NLLLoss, "log"),
    "nll weighted": judged("nll", "ignored", weighted(nn.NLLLoss), "log", class_weights="weights.npy"),
    "log": judged("log", "classes", of_probabilities, "softmax"),
}  # fmt: skip


def decayed_apart(net: nn.Module) -> list[Settings]:
    """Biases in a group of their own, at half the rate."""
    biases = [p for name, p in net.named_parameters() if name.endswith("bias")]
    others = [p for name, p in net.named_parameters() if not name.endswith("bias")]
    return [{"params": others}, {"params": biases, "lr": RATE * 0.5}]


EXTRAS = {
    "nothing": row(),
    "sum": row("--reduction", "sum", "--learning-rate", RATE / 10, reduction="sum", rate=RATE / 10),
    "clip-norm": row("--clip-norm", 0.05, clip=lambda p: nn.utils.clip_grad_norm_(p, 0.05)),
    "clip-value": row("--clip-value", 0.01, clip=lambda p: nn.utils.clip_grad_value_(p, 0.01)),
    "group": row("--group", "*.bias:lr=0.5", groups=decayed_apart),
    "l1": row("--l1", 0.01, penalty=lambda p: 0.01 * sum(w.abs().sum() for w in p)),
    "l2": row("--l2", 0.01, penalty=lambda p: 0.01 * sum(w.square().sum() for w in p)),
    "ema": row("--ema", 0.7, "--use-ema", ema=0.7),
    "loss-scale": row("--loss-scale", 1024),
    "recompute": row("--recompute", "elementwise"),
    "batch": row("--batch-size", 15, batch=15),
    "unshuffled": row("--no-shuffle", shuffle=False),
    "accumulate": row("--batch-size", 15, "--accumulate", 3, batch=15, accumulate=3),
}
"""What goes with every optimizer and loss."""

MSE = LOSSES["mse"]
ALONE = {
    "sample weights": row("--sample-weight", "w", *MSE.arguments, **MSE.settings, sample_weight=True),
    "fine-tuning": row("--freeze", "0.*", *MSE.arguments, **MSE.settings, frozen="0."),
    "two losses, one weighted": row(
        "--loss", "cross-entropy:y:label:0.5", "--loss", "mse:y:other", "--loss-option", "class-weights=weights.npy",
        loss=lambda reduction: lambda p, y, z: 0.5 * weighted(nn.CrossEntropyLoss)(reduction)(p, y)
        + F.mse_loss(p, z, reduction=reduction), labels="ignored", head="plain", other=True,
    ),
    "two losses": row(
        "--loss", "mse:y:label:0.5", "--loss", "mae:y:other",
        loss=lambda reduction: lambda p, y, z: 0.5 * F.mse_loss(p, y, reduction=reduction)
        + F.l1_loss(p, z, reduction=reduction), labels="numbers", head="plain", other=True,
    ),
}  # fmt: skip
"""What goes with some losses alone."""

NORMALIZED = row("--mode", "train", "--unbiased-variance", net="cnn")
CYCLED = {
    "one-cycle": scheduled("one-cycle:cycle-momentum=true", one_cycle_with_momentum),
    "cyclic": scheduled(
        "cyclic:rise=3,fall=2,cycle-momentum=true,base-momentum=0.5,max-momentum=0.95", cyclic_with_momentum
    ),
}
"""Schedules that change the momentum too, which not all optimizers have."""

SMALL_STEPS = row("--learning-rate", RATE / 10, rate=RATE / 10)
"""A momentum of 0.95 makes steps twenty times as long, and with them the rounding of float32."""

WITH_MOMENTUM = [
    name
    for name in OPTIMIZERS
    if name.split()[0] in ("momentum", "nesterov", "rmsprop", "adam", "adamw", "adamax", "radam")
]
GROUPS: dict[str, dict[str, list[Row]]] = {
    "optimizers": {name: [each, MSE] for name, each in OPTIMIZERS.items()},
    "schedules": {name: [OPTIMIZERS["momentum"], MSE, each] for name, each in SCHEDULES.items()},
    "momentum": {
        f"{name}, {optimizer}": [OPTIMIZERS[optimizer], MSE, each, SMALL_STEPS]
        for optimizer in WITH_MOMENTUM
        for name, each in CYCLED.items()
    },
    "losses": {name: [OPTIMIZERS["momentum"], each] for name, each in LOSSES.items()},
    "extras": {name: [OPTIMIZERS["momentum"], MSE, each] for name, each in EXTRAS.items()},
    "alone": {name: [OPTIMIZERS["momentum"], each] for name, each in ALONE.items()},
    "normalization": {name: [each, LOSSES["cross-entropy"], NORMALIZED] for name, each in OPTIMIZERS.items()},
}


def combinations() -> dict[str, list[Row]]:
    """Random combinations of an optimizer, a schedule, a loss and something that goes with all of them."""
    rng, found = np.random.default_rng(7), {}
    for number in range(COMBINATIONS):
        names = [str(rng.choice(list(table))) for table in (OPTIMIZERS, SCHEDULES, LOSSES, EXTRAS)]
        rows = [table[name] for table, name in zip((OPTIMIZERS, SCHEDULES, LOSSES, EXTRAS), names, strict=True)]
        if rng.random() < 0.3 and rows[2].settings["head"] == "plain":
            rows, names = [*rows, NORMALIZED], [*names, "normalized"]
        found[f"{number}: {', '.join(names)}"] = rows
    return found


# -- PyTorch ------------------------------------------------------------------------------------------------------


def network(net: str, head: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(3)
    of_the_file = {"eps": float(np.float32(1e-5)), "momentum": 1 - float(np.float32(0.9))}  # ONNX has float32 there
    layers = {
        "mlp": [nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)],
        "normalized": [nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6, **of_the_file), nn.Tanh(), nn.Linear(6, 3)],
        "cnn": [
            nn.Conv2d(2, 4, 3, bias=False),
            nn.BatchNorm2d(4, **of_the_file),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(16, 3),
        ],
    }
    return nn.Sequential(*layers[net], HEADS[head]()).to(dtype)


def samples(settings: Settings, dtype: str, count: int, seed: int) -> Arrays:
    rng = np.random.default_rng(seed)
    shares, classes = rng.random((count, 3)), rng.integers(0, 3, count)
    labels = {
        "numbers": rng.standard_normal((count, 3)), "shares": shares / shares.sum(1, keepdims=True),
        "counts": rng.poisson(2, (count, 3)).astype(float), "classes": classes,
        "ignored": np.where(rng.random(count) < 0.4, IGNORED, classes),
    }[settings["labels"]]  # fmt: skip
    shape = (2, 4, 4) if settings.get("net") == "cnn" else (4,)
    found = {"x": rng.standard_normal((count, *shape)), "label": labels}
    if settings.get("sample_weight"):
        found["w"] = rng.random(count)
    if settings.get("other"):
        found["other"] = rng.standard_normal((count, 3))
    return {name: array.astype(dtype) if array.dtype == np.float64 else array for name, array in found.items()}


def order(epoch: int, settings: Settings) -> np.ndarray:
    """The order of an epoch of a run with seed 0, as docs/how-to/training-runs.md describes it."""
    if not settings.get("shuffle", True):
        return np.arange(TRAINING)
    return np.random.Generator(np.random.PCG64((0, epoch))).permutation(TRAINING)


def counted(settings: Settings, part: dict[str, torch.Tensor]) -> float:
    """What the mean over a batch divides by, if that depends on the labels."""
    if "counted" not in settings or settings["labels"] not in ("classes", "ignored"):
        return 1.0
    table = torch.tensor(settings["counted"], dtype=torch.float64)
    return float(table[part["label"][part["label"] != IGNORED]].sum())


def by_pytorch(net: nn.Module, settings: Settings, data: Arrays, val: Arrays) -> tuple[Arrays, list[dict[str, float]]]:
    """Train the network; returns its weights and statistics, and the losses of each epoch."""
    tensors, held = ({name: torch.tensor(a) for name, a in arrays.items()} for arrays in (data, val))
    for name, parameter in net.named_parameters():
        parameter.requires_grad = not name.startswith(settings.get("frozen", "none"))
    trained = [p for p in net.parameters() if p.requires_grad]
    rate, size, runs = settings.get("rate", RATE), settings.get("batch", BATCH), settings.get("accumulate", 1)
    optimizer = settings["optimizer"](settings["groups"](net) if "groups" in settings else trained, rate)
    epoch_steps = -(-TRAINING // size)
    scheduler = settings["schedule"](optimizer, EPOCHS * epoch_steps, epoch_steps) if "schedule" in settings else None
    plateau = settings["plateau"](optimizer) if "plateau" in settings else None
    averages: dict[str, torch.Tensor] = {}
    evaluated, rows, taken, whole = copy.deepcopy(net), [], 0, 0.0

    def loss_of(net: nn.Module, part: dict[str, torch.Tensor]) -> torch.Tensor:
        make, reduction = settings["loss"], settings.get("reduction", "mean")
        labels = [part[name] for name in ("label", "other") if name in part]
        if "w" in part:
            return (make(reduction="none")(net(part["x"]), *labels) * part["w"][:, None]).mean()
        loss = make(reduction=reduction)(net(part["x"]), *labels)
        return loss + settings["penalty"](list(net.parameters())) if "penalty" in settings else loss

    for epoch in range(EPOCHS):
        net.train()
        total = 0.0
        for batch in torch.tensor(order(epoch, settings)).split(size):
            part = {name: tensor[batch] for name, tensor in tensors.items()}
            loss = loss_of(net, part)
            total += loss.item() * (1 if settings.get("reduction") == "sum" else len(batch))
            weight = counted(settings, part) if settings.get("reduction", "mean") == "mean" else 1.0
            (loss * weight).backward()
            taken, whole = taken + 1, whole + weight
            if taken % runs == 0:
                if settings.get("reduction", "mean") == "mean":
                    for parameter in trained:
                        parameter.grad /= whole
                whole = 0.0
                if "clip" in settings:
                    settings["clip"](trained)
                optimizer.step()
                optimizer.zero_grad()
                if "ema" in settings:
                    share = settings["ema"] if averages else 0.0
                    averages = {n: share * averages.get(n, 0.0) + (1 - share) * p.detach()
                                for n, p in net.named_parameters()}  # fmt: skip
            if scheduler is not None:
                scheduler.step()
        evaluated.load_state_dict({**net.state_dict(), **averages})
        evaluated.eval()
        with torch.no_grad():
            val_loss = loss_of(evaluated, held).item()
        if settings.get("reduction") == "sum":
            val_loss /= VALIDATION
        if plateau is not None:
            plateau.step(val_loss)
        rows.append({"loss": total / TRAINING, "val_loss": val_loss})
    return {name: tensor.numpy() for name, tensor in evaluated.state_dict().items() if tensor.ndim}, rows


# -- the comparison -----------------------------------------------------------------------------------------------

Compared = Callable[[str, list[Row], str], float]


def difference(
    ours: Arrays, our_epochs: list[dict[str, float]], theirs: Arrays, epochs: list[dict[str, float]]
) -> float:
    """The largest difference of two runs; see `TOLERANCE`."""
    apart = [
        float(np.abs(array - theirs[key]).max() / max(1.0, np.abs(theirs[key]).max())) for key, array in ours.items()
    ]
    for told, wanted in zip(our_epochs, epochs, strict=True):
        apart += [abs(told[key] - value) / abs(value) for key, value in wanted.items()]
    return max(apart)


@pytest.fixture
def compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Compared:
    """Train rows with the command and in PyTorch, and return the largest difference."""
    monkeypatch.chdir(tmp_path)
    np.save("weights.npy", CLASS_WEIGHTS)
    shell, number = Shell(tmp_path, capsys), itertools.count()

    def compare(name: str, rows: list[Row], dtype: str) -> float:
        settings = {key: value for each in rows for key, value in each.settings.items()}
        kind, head = settings.get("net", "mlp"), settings["head"]
        if kind == "cnn" and dtype == "float64":
            kind = settings["net"] = "normalized"  # onnxruntime has no convolution of float64
        module, file, run = network(kind, head, getattr(torch, dtype)), f"{kind}-{head}-{dtype}.onnx", next(number)
        data, val = samples(settings, dtype, TRAINING, 1), samples(settings, dtype, VALIDATION, 2)
        if not Path(file).exists():
            torch.onnx.export(
                module.eval(), (torch.tensor(data["x"][:2]),), file, dynamo=False, do_constant_folding=False,
                training=torch.onnx.TrainingMode.PRESERVE, input_names=["x"], output_names=["y"],
                dynamic_axes={"x": {0: "n"}, "y": {0: "n"}}, opset_version=17,
            )  # fmt: skip
        np.savez("data.npz", **data)
        np.savez("val.npz", **val)
        result = shell(
            "train", file, "--data", "data.npz", "--val", "val.npz", "--epochs", EPOCHS, "--batch-size", BATCH,
            "--learning-rate", RATE, "--json", "--threads", 1, "-o", f"{run}.onnx",
            *(argument for each in rows for argument in each.arguments),
        )  # fmt: skip
        assert result.code == 0, f"{name}: {result.err[:600]} ... {result.err[-800:]}"
        weights, epochs = by_pytorch(module, settings, data, val)
        checkpoint = load_file(f"{run}.onnx.run/checkpoint.safetensors")
        ours = {key: checkpoint.get(f"{key}_ema", array) for key, array in checkpoint.items() if key in weights}
        assert len(ours) == len(weights) or "frozen" in settings, (name, sorted(checkpoint))
        apart = difference(ours, result.json["epochs"], weights, epochs)
        if dtype == "float32" and apart > TOLERANCE[dtype]:
            wide = [
                {k: a.astype(float) if a.dtype == np.float32 else a for k, a in each.items()} for each in (data, val)
            ]
            exact = by_pytorch(network(kind, head, torch.float32).double(), settings, *wide)
            apart = min(apart, difference(ours, result.json["epochs"], *exact))
        return apart

    return compare


def check(compared: Compared, group: str, cases: dict[str, list[Row]], dtype: str) -> None:
    """Compare cases, print the largest difference, and name all that are above the tolerance."""
    apart = {name: compared(name, rows, dtype) for name, rows in cases.items()}
    worst = max(apart, key=lambda name: apart[name])
    print(f"{group} in {dtype}: {len(cases)} cases, largest difference {apart[worst]:.1e} ({worst})")
    assert not (wrong := {name: f"{x:.1e}" for name, x in apart.items() if not x <= TOLERANCE[dtype]}), wrong


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.thinned(2)
def test_table(group: str, dtype: str, compared: Compared) -> None:
    check(compared, group, GROUPS[group], dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.thinned(2)
def test_random_combinations(dtype: str, compared: Compared) -> None:
    check(compared, "combinations", combinations(), dtype)


def test_one_of_each_group(compared: Compared) -> None:
    check(compared, "one of each group", {group: list(rows.values())[-1] for group, rows in GROUPS.items()}, "float64")
