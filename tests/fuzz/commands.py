"""The command lines that a mutated model goes through."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import get_args

from onnxgrad_cli.common.choices import Derivative
from tests.fuzz.corpus import Seed

LOSSES = ("mse", "mse", "mae", "cross-entropy", "bce-logits", "huber", "nll", "identity")
OPTIMIZERS = ("sgd", "adam", "adamw", "lion", "momentum", "rmsprop")
CHOICES = (
    ["--mode", "train"], ["--mode", "eval"], ["--grad-of-input", "*"], ["--quantization", "ste"], ["--init", "he"],
    ["--recompute", "elementwise"], ["--recompute", "block:auto"], ["--recompute", "budget:1kB"],
    ["--quantization", "lsq"], ["--target", "portable"], ["--target", "ort-cuda"], ["--untie", "*"],
    ["--lora", "2"], ["--lora", "1", "--lora-target", "*"], ["--lora", "2", "--lora-dora"],
    ["--lora", "2", "--lora-dropout", "0.5"], ["--train", "*"], ["--loss-chunks", "2"], ["--l1", "0.1"],
    ["--preset", "norm"], ["--preset", "bias"], ["--train-last", "1"], ["--clip-norm", "1"], ["--clip-value", "1"],
    ["--loss-scale", "dynamic"], ["--target", "ort-cpu"],
    ["--l2", "0.1"], ["--accumulate", "2"], ["--ema", "0.9"], ["--reduction", "sum"],
    ["--sample-weight", "sw"], ["--freeze", "*b*"], ["--dim", "batch=2"],
)  # fmt: skip
OF_BUILD = (
    ["--training-info"], ["--no-verify"], ["--verify"], ["--identifiers"], ["--as-gradient-op"],
    ["--dump-passes", "passes"],
    ["--test-data", "../in/data.npz"], ["--infer-by-run"], ["--stop-after", "prepare"],
    ["--yield", "input"], ["--yield", "keep"], ["--weights", "inputs"], ["--keep-outputs"], ["--picture", "p.html"],
    ["--no-embed-state"], ["-vv"],
)  # fmt: skip

OF_MODELS = ("build",) * 8 + ("derive",) * 3 + ("inspect", "inspect", "expand", "view", "view", "check", "tune")
WITH_DATA = ("train",) * 4 + ("evaluate", "evaluate", "predict", "explain", "explain", "attack", "export")
OF_TRAINING_MODELS = ("check",) * 4 + ("expand", "view", "inspect", "build", "pack", "pack")
DATA = ["--data", "../in/data.npz"]


def draw(rng: Random, seed: Seed, model: str, has_data: bool) -> tuple[list[str], list[str]]:
    """A command line, and the files that it writes when all goes well.

    Args:
        model: the name of the file in ../in.
        seed: what was mutated.
        has_data: whether there are data for it at ../in/data.npz.
    """
    kind = rng.choice(OF_TRAINING_MODELS if seed.is_training else OF_MODELS + WITH_DATA * has_data)
    words, written = _DRAWN[kind](rng, seed)
    if kind == "export":
        return ["export", "../in/weights.safetensors", "--model", f"../in/{model}", *words], written
    if model != "model.onnx" and rng.random() < 0.5:
        words, written = ([word.replace("out.onnx", f"out{model}") for word in each] for each in (words, written))
    return [kind, f"../in/{model}", *words, *(["--json"] * (rng.random() < 0.15))], written


def _what_to_build(rng: Random, choices: Sequence[list[str]], loss: str) -> list[str]:
    words = ["--loss", loss]
    for choice in rng.sample(choices, rng.choice((0, 0, 1, 1, 2, 3))):
        words += choice
    return words + ["--optimizer", rng.choice(OPTIMIZERS)] * (rng.random() < 0.3)


def _build(rng: Random, seed: Seed) -> tuple[list[str], list[str]]:
    words = _what_to_build(rng, CHOICES + OF_BUILD, rng.choice((*LOSSES, seed.loss, seed.loss)))
    reports = ["--report", "r.html", "--report", "r.md", "--report", "r.json"]
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
    words = ["--kind", rng.choice(get_args(Derivative))] if rng.random() < 0.7 else []
    values = [name for node in seed.model.graph.node for name in node.output]
    # Second derivatives and Jacobians by dozens of tensors together are tens of thousands of nodes, and rightly take as
    # many seconds; and onnxruntime opens a loop over thousands, which read as many from outside, in a time that grows
    # with their square.
    in_loops = bool({"jacobian", "hessian", "hessian-diagonal", "laplacian"}.intersection(words))
    paths = len(seed.model.graph.initializer) + len(seed.model.graph.input)
    every = ["--wrt", "*"] if not in_loops or paths < 20 else []
    if len(seed.model.graph.node) > 1000 and in_loops:
        words = []
    for choice in (every, ["--of", rng.choice(values or ["*"])], ["--wrt", rng.choice(values or ["*"])]):
        words += choice * (rng.random() < 0.15)
    of_classes = ["--class", rng.choice(("0", "argmax", "label"))]
    for choice in (["--per-sample"], of_classes, ["--names", "casadi"], ["--weighted"]):
        words += choice * (rng.random() < 0.15)
    return [*words, "-o", "out.onnx"], ["out.onnx"]


def _evaluate(rng: Random, seed: Seed) -> tuple[list[str], list[str]]:
    return [*DATA, "--loss", seed.loss, *rng.choice(([], ["--metric", "accuracy"], ["--metric", "rmse"]))], []


def _predict(rng: Random, seed: Seed) -> tuple[list[str], list[str]]:
    out = rng.choice(("out.npz", "out.csv"))
    return [*DATA, "-o", out, *rng.choice(([], ["--batch-size", "2"]))], [out]


def _explain(rng: Random, seed: Seed) -> tuple[list[str], list[str]]:
    method = rng.choice(("saliency", "smoothgrad", "integrated-gradients", "grad-cam", "occlusion"))
    few = {"smoothgrad": ["--repeats", "2"], "integrated-gradients": ["--steps", "2"]}.get(method, [])
    out = rng.choice(("out.npz", "out.html", "out.png"))
    return [*DATA, "--method", method, *few, "--class", rng.choice(("0", "argmax", "label")), "-o", out], [out]


def _attack(rng: Random, seed: Seed) -> tuple[list[str], list[str]]:
    pgd = ["--method", "pgd", "--steps", "2"]
    more = (["--norm", "2"], ["--targeted", "1"], ["--loss", "margin"], ["--loss", "dlr"], [*pgd, "--restarts", "2"])
    way = rng.choice((["--method", "fgsm"], pgd, *more))
    return [*DATA, *way, "-o", "out.npz"], ["out.npz"]


def _check(rng: Random, seed: Seed) -> tuple[list[str], list[str]]:
    return rng.choice(([], [], ["--dim", "batch=2"], DATA, ["--original", "../in/model.onnx"])), []


def _tune(rng: Random, seed: Seed) -> tuple[list[str], list[str]]:
    return ["--loss", seed.loss, "--repeat", "1", "--threads", "1", "-o", "out.toml"], []


def _pack(rng: Random, seed: Seed) -> tuple[list[str], list[str]]:
    return [*DATA, *["--ort"] * (rng.random() < 0.3), "-o", "page"], []


def _view(rng: Random, seed: Seed) -> tuple[list[str], list[str]]:
    suffix = rng.choice(("html", "dot"))
    return ["-o", f"out.{suffix}", *rng.choice(([], ["--limit", "0"], ["--limit", "3"], ["--depth", "1"]))], [
        f"out.{suffix}"
    ]


_DRAWN = {
    "build": _build,
    "inspect": _inspect,
    "train": _train,
    "derive": _derive,
    "view": _view,
    "expand": lambda rng, seed: (["-o", "out.onnx"], ["out.onnx"]),
    "check": _check,
    "evaluate": _evaluate,
    "predict": _predict,
    "explain": _explain,
    "attack": _attack,
    "tune": _tune,
    "pack": _pack,
    "export": lambda rng, seed: (["-o", "out.onnx", *["--keep-mode"] * (rng.random() < 0.2)], ["out.onnx"]),
}
