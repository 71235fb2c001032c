"""Map the names of commands and options in other programs to those of onnxgrad."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from onnxgrad_cli.errors import suggest

SYNONYMS = {
    "accumulate": "gradient-accumulation-steps accumulate-grad-batches accumulation-steps grad-accum",
    "augment": "aug augmentation augmentations data-augmentation",
    "balance": "class-balance balanced sampler weighted-sampler group-by-length",
    "batch-size": "bs batch minibatch-size train-batch-size per-device-train-batch-size per-device-eval-batch-size",
    "class-weights": "weight class-weight",
    "classes": "num-classes n-classes nclass num-labels",
    "clip-norm": "max-grad-norm grad-clip clip-grad clip-grad-norm gradient-clip-val clipnorm global-clipnorm",
    "clip-value": "clipvalue clip-grad-value",
    "data": "dataset data-dir data-path dataset-name train-data train-file train-dir training-data input-data",
    "ema": "ema-decay polyak ema-momentum",
    "epochs": "num-epochs num-train-epochs n-epochs nb-epochs nb-epoch max-epochs max-iter n-iter epoch",
    "eps": "epsilon adam-epsilon",
    "eval-every": "eval-steps eval-interval eval-freq val-check-interval",
    "force": "overwrite overwrite-output-dir exist-ok",
    "freeze": "freeze-layers frozen",
    "label": "labels targets label-column label-col target-column label-name label-names",
    "label-smoothing": "label-smoothing-factor smoothing",
    "learning-rate": "lr rate base-lr init-lr initial-lr max-lr peak-lr learning-rate-init eta0",
    "log": "log-dir logging-dir logger report-to tensorboard",
    "lora RANK": "lora-r lora-rank rank",
    "lora RANK:ALPHA": "lora-alpha",
    "lora-dora": "use-dora",
    "lora-scaling rslora": "use-rslora",
    "lora-target": "target-modules lora-target-modules",
    "loss": "criterion objective loss-function loss-fn loss-fct",
    "loss-option class-weights=1,2": "class-weight class-weights",
    "loss-option ignore-index=-100": "ignore-index",
    "loss-option label-smoothing=0.1": "label-smoothing label-smoothing-factor",
    "map COLUMN=INPUT": "features input-columns feature-columns feature-cols",
    "max-length": "max-seq-length max-seq-len max-len seq-len seq-length context-length block-size",
    "max-steps": "num-steps steps train-steps num-train-steps max-iters iterations num-iterations steps-per-epoch",
    "metric": "metrics metric-for-best-model scoring",
    "normalize": "standardize normalization mean std",
    "optimizer": "optim opt solver",
    "optimizer-option beta1=0.9": "beta1 adam-beta1 betas",
    "optimizer-option beta2=0.999": "beta2 adam-beta2",
    "optimizer-option eps=1e-08": "eps adam-epsilon",
    "optimizer-option momentum=0.9": "momentum",
    "optimizer-option weight-decay=0.01": "wd weight-decay decay",
    "out": "output-dir output-file out-file save-dir save-path output-path",
    "patience": "early-stopping-patience early-stopping n-iter-no-change",
    "preset bias": "bias-only",
    "preset head": "head-only",
    "provider": "device accelerator gpu",
    "provider cuda": "cuda use-cuda use-gpu",
    "recompute block:auto": "gradient-checkpointing checkpointing activation-checkpointing remat",
    "resume": "resume-from-checkpoint resume-from continue checkpoint ckpt ckpt-path",
    "sample-weight": "sample-weights",
    "save-every": "save-steps save-freq save-interval checkpoint-every",
    "schedule": "scheduler lr-scheduler lr-schedule lr-scheduler-type lr-policy sched",
    "schedule cosine:warmup=100": "warmup warmup-steps num-warmup-steps warmup-ratio warmup-epochs",
    "seed": "random-state random-seed manual-seed rng-seed",
    "threads": "num-threads nthreads n-jobs num-workers workers",
    "train": "trainable unfreeze train-layers",
    "val": "validation-split val-split validation-data validation-file validation-fraction val-data eval-data "
    "eval-dataset valid",
    "weight-decay": "wd decay",
}
"""Option of onnxgrad, possibly with a value -> its names in other programs, separated by blanks."""


COMMANDS = {
    "check": "gradcheck prove verify",
    "evaluate": "eval score test validate",
    "inspect": "diagnose doctor info summary",
    "list losses": "losses loss",
    "list metrics": "metrics metric",
    "list operators": "operators ops",
    "list optimizers": "optimizers optimizer",
    "list passes": "passes",
    "list schedules": "schedules schedulers",
    "predict": "infer inference run",
    "train": "finetune fine-tune fit",
    "tune": "autotune benchmark",
    "view": "draw plot visualize",
}
"""Command of onnxgrad -> its names in other programs, and words that people try, separated by blanks."""


def meant_command(name: str) -> str:
    """Return onnxgrad's command for a name in another program; "" if none is known."""
    return next((use for use, names in COMMANDS.items() if name.lower() in names.split()), "")


def meant(name: str, known: Iterable[str]) -> list[str]:
    """Return onnxgrad's options for a name in another program, as a user types them after the dashes.

    Args:
        name: an option or a setting of another program.
        known: the available options or settings.
    """
    there = {each.replace("_", "-") for each in known}
    word = name.lstrip("-").replace("_", "-").lower()
    return [use for use, names in SYNONYMS.items() if use.partition(" ")[0] in there and word in names.split()]


def suggest_setting(name: str, known: Iterable[str], show: Callable[[str], str] = str) -> str:
    """Return a hint for an unknown option or setting.

    If other programs use the name, the hint is onnxgrad's name for that option. Otherwise, it is the hint of `suggest`.
    """
    known = list(known)
    found = [each for each in known if each.replace("_", "-") in meant(name, known)]
    return f"did you mean {show(found[0])}?" if found else suggest(name, known, "options", show)
