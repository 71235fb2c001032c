"""The command lines that a mutated model goes through."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from tests.fuzz.corpus import Seed

LOSSES = ("mse", "mse", "mae", "cross-entropy", "bce-logits", "huber", "nll", "identity")
OPTIMIZERS = ("sgd", "adam", "adamw", "lion", "momentum", "rmsprop")
CHOICES = (
    ["--mode", "train"], ["--mode", "eval"], ["--grad-of-input", "*"], ["--quantization", "ste"], ["--init", "he"],
    ["--recompute", "elementwise"],
    ["--lora", "2"], ["--preset", "bias"], ["--train-last", "1"], ["--clip-norm", "1"], ["--loss-scale", "dynamic"],
    ["--target", "ort-cpu"],
    ["--l2", "0.1"], ["--accumulate", "2"], ["--ema", "0.9"], ["-vv"], ["--reduction", "sum"],
    ["--sample-weight", "sw"], ["--freeze", "*b*"], ["--dim", "batch=2"],
)  # fmt: skip
OF_BUILD = (
    ["--training-info"], ["--no-verify"], ["--verify"], ["--identifiers"], ["--as-gradient-op"],
    ["--dump-passes", "passes"],
    ["--test-data", "../in/data.npz"], ["--infer-by-run"], ["--stop-after", "prepare"],
)  # fmt: skip


def draw(rng: Random, seed: Seed, model: str, can_train: bool) -> tuple[list[str], list[str]]:
    """A command line, and the files that it writes when all goes well.

    Args:
        model: the name of the file in ../in.
        seed: what was mutated.
        can_train: whether there are data for it at ../in/data.npz.
    """
    kinds = (
        ("build",) * 8 + ("inspect", "doctor", "derive", "derive", "expand", "view", "view", "check") + ("train",) * 3
    )
    kind = rng.choice(("check", "check", "check", "expand", "view", "doctor", "build") if seed.is_training else kinds)
    kind = "build" if kind == "train" and not can_train else kind
    words, written = _DRAWN[kind](rng, seed)
    if model != "model.onnx" and rng.random() < 0.5:
        words, written = ([word.replace("out.onnx", f"out{model}") for word in each] for each in (words, written))
    return [kind, f"../in/{model}", *words, *(["--json"] * (rng.random() < 0.15))], written


def _what_to_build(rng: Random, choices: Sequence[list[str]], loss: str) -> list[str]:
    words = ["--loss", loss]
    for choice in rng.sample(choices, rng.choice((0, 0, 1, 1, 2))):
        words += choice
    return words + ["--optimizer", rng.choice(OPTIMIZERS)] * (rng.random() < 0.3)


def _build(rng: Random, seed: Seed) -> tuple[list[str], list[str]]:
    words = _what_to_build(rng, CHOICES + OF_BUILD, rng.choice((*LOSSES, seed.loss, seed.loss)))
    reports = ["--report", "r.html", "--report", "r.md", "--report", "r.json", "--report", "r.txt"]
    words += rng.choice(([], [], reports, ["--no-report"]))
    return (
        ([*words, "--artifacts", "artifacts"], []) if rng.random() < 0.1 else ([*words, "-o", "out.onnx"], ["out.onnx"])
    )


def _inspect(rng: Random, seed: Seed) -> tuple[list[str], list[str]]:
    return _what_to_build(rng, CHOICES, rng.choice((*LOSSES, seed.loss))), []


def _train(rng: Random, seed: Seed) -> tuple[list[str], list[str]]:
    words = _what_to_build(rng, CHOICES, seed.loss)
    return [*words, "--data", "../in/data.npz", "--epochs", "1", "--batch-size", "2", "-o", "out.onnx"], ["out.onnx"]


def _derive(rng: Random, seed: Seed) -> tuple[list[str], list[str]]:
    kind = rng.choice((["--kind", "jvp"], ["--kind", "hvp"], ["--kind", "jacobian"], ["--kind", "hessian"], [], []))
    return [*kind, "-o", "out.onnx"], ["out.onnx"]


def _view(rng: Random, seed: Seed) -> tuple[list[str], list[str]]:
    suffix = rng.choice(("svg", "html", "dot", "mmd"))
    return ["-o", f"out.{suffix}", *rng.choice(([], ["--limit", "0"], ["--limit", "3"], ["--depth", "1"]))], [
        f"out.{suffix}"
    ]


_DRAWN = {
    "build": _build,
    "inspect": _inspect,
    "doctor": _inspect,
    "train": _train,
    "derive": _derive,
    "view": _view,
    "expand": lambda rng, seed: (["-o", "out.onnx"], ["out.onnx"]),
    "check": lambda rng, seed: (rng.choice(([], [], ["--dim", "batch=2"])), []),
}
