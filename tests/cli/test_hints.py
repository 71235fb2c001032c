"""Hints work: each one that names an option or a command is followed as it is printed, and the error is gone.

A case causes an error, takes a part of the hint as the command printed it, fills its placeholders, and runs the
command again. `test_each_hint_has_a_case` finds the hints in the source.
"""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxgrad_cli import errors
from onnxgrad_cli.cli import cli
from onnxgrad_cli.common.flags import FLAGS, as_cli_flags
from tests.cli_harness import MLP, NO_WEIGHTS, Result, Shell, save

SOURCE = Path(__file__).parents[2] / "onnxgrad_cli"


@dataclass(frozen=True)
class Case:
    """An error and the part of its hint that is followed.

    Attributes:
        hint: the text in the source.
        command: causes the error.
        use: the part of the printed hint that is followed: options, a command, or 'leave --NAME out'.
        fill: what stands for the placeholders in `use`, and values for options that the hint names without one.
        setup: commands that run first.
        of_setup: the hint is about the last of these commands, which is run again with it.
        then: the command that follows a hint which is a command of its own.
    """

    hint: str
    command: str
    use: str
    fill: Mapping[str, str] = field(default_factory=dict)
    setup: tuple[str, ...] = ()
    of_setup: bool = False
    then: str = ""


BUILD = "build mlp.onnx --loss mse --no-verify -o t.onnx"
TRAIN = "train mlp.onnx --data data.npz --epochs 1 -o t.onnx"
TRAINED = (TRAIN,)
LORA = TRAIN + " --lora 1 --adapter a.safetensors"
SGD = {"NAME": "sgd"}
SETS = "train mlp.onnx --epochs 1 -o t.onnx --data one=data.npz --loss one=mse"
CASES = [
    # data sets with names
    Case("choose one: `losses={}={}`", TRAIN.replace("data.npz", "one=data.npz") + " --loss mae", "--loss one=mae"),
    Case("choose one: `losses={}={}`", BUILD.replace("mse", "one=mse") + " --loss mae", "--loss one=mae"),
    Case(
        "give each its own name, such as `data=train=DATA`",
        SETS + " --loss train=mse --data one=others.npz",
        "--data train=DATA",
        {"DATA": "others.npz"},
    ),
    Case(
        "name it: `data=NAME={}`", SETS + " --loss two=mse --data others.npz", "--data NAME=others.npz", {"NAME": "two"}
    ),
    Case("name the data: `data={}=DATA`", TRAIN + " --loss one=mse", "--data one=DATA", {"DATA": "data.npz"}),
    Case(
        "name the data: `data=NAME=DATA`",
        TRAIN + " --val one=others.npz",
        "--data NAME=DATA",
        {"NAME=DATA": "one=data.npz --loss one=mse"},
    ),
    Case(
        "add one, such as `losses={}=mse`",
        SETS + " --data two=others.npz",
        "--loss two=mse",
        {"--loss two=mse": "--loss one=mse --loss two=mse"},
    ),
    Case(
        "use `val={}`, or `val={}=DATA`",
        SETS + " --data two=others.npz --loss two=mse --val two=0.2",
        "--val 0.2",
    ),
    Case(
        "use `mode='eval'`",
        "build normal.onnx --loss one=mse --loss two=mse --mode train --no-verify -o t.onnx",
        "--mode eval",
    ),
    # options of a build
    Case("choose an optimizer with `optimizer=NAME`", BUILD + " --ema 0.9", "--optimizer NAME", SGD),
    Case(
        "add `optimizer=NAME`, or set `loss_scale` to a number",
        BUILD + " --loss-scale dynamic",
        "--optimizer NAME",
        SGD,
    ),
    Case(
        "use `mode='eval'`, or another optimizer",
        "train normal.onnx --data data.npz --freeze o --epochs 1 --optimizer lbfgs --mode train -o t.onnx",
        "--mode eval",
    ),
    Case(
        "use it in `onnxgrad train`, or choose an optimizer such as `optimizer='adam'`",
        BUILD + " --optimizer lbfgs",
        "--optimizer adam",
    ),
    Case("add `optimizer=NAME`", BUILD + " --training-info", "--optimizer NAME", SGD),
    Case(
        "build it with `optimizer=NAME`",
        "pack t.onnx -o site --data data.npz",
        "--optimizer NAME",
        SGD,
        (BUILD,),
        of_setup=True,
    ),
    Case(
        "use `reduction='mean'`",
        BUILD + " --optimizer sgd --accumulate 2 --reduction sum --l2 0.1",
        "--reduction mean",
    ),
    Case(
        "leave `untie` out",
        "build p.onnx --loss mse:y --no-verify --untie '*' -o t.onnx",
        "leave --untie out",
        setup=("derive mlp.onnx --kind vjp --wrt x --option keep-outputs --no-verify -o p.onnx",),
    ),
    Case(
        "for labels of 0 and 1 choose `losses={}`",
        "build scores.onnx --loss cross-entropy --output one --no-verify -o t.onnx",
        "--loss bce-logits",
    ),
    Case(
        "take the last axis for the classes with `loss_options=class-axis=-1`",
        "build rows.onnx --loss cross-entropy --no-verify -o t.onnx",
        "--loss-option class-axis=-1",
    ),
    Case(
        "if -1 marks samples to ignore, save {} for it or set `loss_options=ignore-index=-1`; {}",
        "evaluate mlp.onnx --data ignored.npz --loss cross-entropy",
        "--loss-option ignore-index=-1",
    ),
    Case("freeze fewer weights, or leave out `freeze`", BUILD + " --freeze '*'", "leave out --freeze"),
    Case(
        "leave `preset` out, and choose weights with `train=GLOB`",
        BUILD + " --preset norm",
        "leave --preset out, and choose weights with --train GLOB",
        {"GLOB": "w1"},
    ),
    Case(
        "leave out `optimizer`, or train some weights",
        "build bare.onnx --loss mse --grad-of-input x --optimizer sgd -o t.onnx",
        "leave out --optimizer",
    ),
    Case(
        "request gradients of its float inputs with `grad_of_input='*'`",
        "build bare.onnx --loss mse -o t.onnx",
        "--grad-of-input '*'",
    ),
    Case(
        "pass `quantization='ste'` to train the weights stored as integers with the straight-through estimator",
        "build integers.onnx --loss mse -o t.onnx",
        "--quantization ste",
    ),
    Case(
        "pass `quantization='ste'` to use the straight-through estimator",
        "build rounded.onnx --loss mse -o t.onnx",
        "--quantization ste",
    ),
    Case(
        "use `quantization='ste'`",
        "derive mlp.onnx --kind jvp --wrt x --quantization lsq -o t.onnx",
        "--quantization ste",
    ),
    Case(
        "use `quantization='ste'`; `quantization='lsq'` trains only quantizers of "
        "onnxruntime.quantization.quantize_static",
        BUILD + " --quantization lsq",
        "--quantization ste",
    ),
    Case("leave out `yield_`", BUILD + " --optimizer sgd --training-info --yield keep", "leave out --yield"),
    Case(
        "remove it with `onnxgrad expand MODEL -o plain.onnx`, and add `training_info` to that model",
        "build info.onnx --loss mse --optimizer sgd --training-info -o t.onnx",
        "`onnxgrad expand MODEL -o plain.onnx`",
        {"MODEL": "info.onnx"},
        ("build mlp.onnx --loss mse --optimizer sgd --training-info --no-verify -o info.onnx",),
        then="build plain.onnx --loss mse --optimizer sgd --training-info --no-verify -o t.onnx",
    ),
    Case(
        "use the model that `onnxgrad build MODEL --stop-after prepare -o prepared.onnx` writes, which has the form "
        "that is differentiated, and add `training_info` to it",
        "build old.onnx --loss mse --optimizer sgd --training-info -o t.onnx",
        "`onnxgrad build MODEL --stop-after prepare -o prepared.onnx`",
        {"MODEL": "old.onnx"},
        then="build prepared.onnx --loss mse --optimizer sgd --training-info --no-verify -o t.onnx",
    ),
    Case("request adapters with `lora=RANK`", BUILD + " --lora-dora", "--lora RANK", {"RANK": "1"}),
    Case("train adapters with `lora=RANK`", TRAIN + " --adapter a.safetensors", "--lora RANK", {"RANK": "1"}),
    Case(
        "give each label its own name: `losses=NAME:OUTPUT:LABEL`",
        "build two.onnx --loss mse:y:t --loss mse:z:t --no-verify -o t.onnx",
        "--loss NAME:OUTPUT:LABEL",
        {"NAME:OUTPUT:LABEL": "mse:z:u"},
    ),
    Case("add --artifacts DIR", "build mlp.onnx --loss mse --no-verify --prefix a", "--artifacts DIR", {"DIR": "dir"}),
    Case(
        "name a file with `out`",
        "build mlp.onnx --loss mse --no-verify --weights inputs -o -",
        "--out",
        {"--out": "--out t.onnx"},
    ),
    Case(
        "name a file with `out`",
        "build mlp.onnx --loss mse --no-verify --picture p.html -o -",
        "--out",
        {"--out": "--out t.onnx"},
    ),
    Case("replace it with `force=True`", "build mlp.onnx --loss mse --no-verify -o mine.onnx", "--force"),
    Case(
        "name a file; -o - writes to standard output",
        "build mlp.onnx --loss mse --no-verify -o /dev/null",
        "name a file",
    ),
    Case(
        "write such a file with `onnxgrad tune MODEL`",
        BUILD + " --tuned bad.toml",
        "`onnxgrad tune MODEL`",
        {"MODEL": "mlp.onnx --loss mse --repeat 1 -o tuned.toml"},
        then=BUILD + " --tuned tuned.toml",
    ),
    Case(
        "expand it first: onnxgrad expand MODEL",
        "build gradient.onnx --loss mse --no-verify -o t.onnx",
        "onnxgrad expand MODEL",
        {"MODEL": "gradient.onnx -o plain.onnx"},
        then="build plain.onnx --loss mse --no-verify -o t.onnx",
    ),
    Case("see '{} --help'", "build mlp.onnx --losss mse", "'onnxgrad build --help'", then=BUILD),
    # derivatives, explanations, attacks
    Case(
        "leave it out, or leave `kind` out",
        "derive total.onnx --kind jvp --option loss --wrt x -o t.onnx",
        "leave --kind out",
    ),
    Case(
        "choose other outputs with `of`",
        "derive turned.onnx --kind jacobian --per-sample --wrt x --of z -o t.onnx",
        "--of",
        {"--of": "--of y"},
    ),
    Case(
        "choose other inputs with `wrt`",
        "derive scores.onnx --kind hessian --per-sample --of flat --wrt w -o t.onnx",
        "--wrt",
        {"--wrt": "--wrt x"},
    ),
    Case(
        "choose another output with `output`",
        "attack scores.onnx --data data.npz --output one -o a.npz",
        "--output",
        {"--output": "--output y"},
    ),
    Case(
        "choose an output [batch, classes] with `output`, or set the axis with `class_axis`",
        "explain scores.onnx --data data.npz --output flat --class 0 -o a.npz",
        "--output",
        {"--output": "--output y"},
    ),
    Case(
        "choose one with `wrt`",
        "explain sides.onnx --data sides.npz --class 0 -o a.npz",
        "--wrt",
        {"--wrt": "--wrt x"},
    ),
    Case(
        "choose a value [batch, channels, *positions] with `layer`, or use another method",
        "explain pooled.onnx --data pooled.npz --method grad-cam --class 0 -o a.npz",
        "--layer",
        {"--layer": "--layer h"},
    ),
    Case("use `method='pgd'`", "attack mlp.onnx --data data.npz --method fgsm --steps 3 -o a.npz", "--method pgd"),
    Case("use `method='pgd'`", "attack mlp.onnx --data data.npz --restarts 2 -o a.npz", "--method pgd"),
    Case(
        "leave `start=False` out",
        "attack mlp.onnx --data data.npz --method pgd --restarts 2 --no-start -o a.npz",
        "leave --no-start out",
    ),
    Case("use `loss='margin'`", "attack mlp.onnx --data data.npz --loss dlr -o a.npz", "--loss margin"),
    Case(
        "name a float input with `wrt`",
        "attack mlp.onnx --data data.npz --wrt h -o a.npz",
        "--wrt",
        {"--wrt": "--wrt x"},
    ),
    Case(
        "choose a float input with `wrt`: {}",
        "explain mixed.onnx --data mixed.npz --wrt ids -o a.npz",
        "--wrt",
        {"--wrt": "--wrt x"},
    ),
    Case(
        "leave out `wrt` to explain the embeddings",
        "explain looked.onnx --data looked.npz --wrt ids -o a.npz",
        "leave out --wrt",
    ),
    Case(
        "leave `wrt` out; choose the layer with `layer`",
        "explain pooled.onnx --data pooled.npz --method grad-cam --wrt x --class 0 --layer h -o a.npz",
        "leave --wrt out",
    ),
    # training
    Case(
        "choose `optimizer=NAME`, one of {}",
        TRAIN + " --optimizer sgd --schedule one-cycle:cycle-momentum=true",
        "--optimizer NAME",
        {"NAME": "momentum"},
    ),
    Case(
        "leave {} out of `group`",
        TRAIN + " --schedule one-cycle:cycle-momentum=true --group w1:beta1=0.5",
        "leave beta1 out of --group",
        {"leave beta1 out of --group": "leave --group out"},
    ),
    Case(
        "add `val=DATA`, or `val=0.2` for a fifth of the data",
        TRAIN + " --patience 2",
        "--val DATA, or --val 0.2 for a fifth of the data",
        {"--val DATA, or --val 0.2 for a fifth of the data": "--val 0.2"},
    ),
    Case(
        "choose a smaller number, or a smaller `batch_size`",
        TRAIN + " --accumulate 3",
        "--batch-size",
        {"--batch-size": "--batch-size 8"},
    ),
    *(
        Case(
            "`force=True` replaces it, `resume` continues it, `run=DIR` uses another folder",
            TRAIN,
            use,
            fill,
            TRAINED,
        )
        for use, fill in (("--force", {}), ("--resume", {}), ("--run DIR", {"DIR": "other"}))
    ),
    *(
        Case(
            "leave `resume` out to start a new run, or use `resume='auto'`, which starts one if there is no checkpoint",
            TRAIN + " --resume",
            use,
        )
        for use in ("leave --resume out", "--resume auto")
    ),
    Case("leave `balance` out", TRAIN + " --balance", "leave --balance out"),
    Case("leave `val_prefix` out", TRAIN + " --val 0.5 --val-prefix test_", "leave --val-prefix out"),
    *(
        Case(
            "choose a larger `batch_size`{}, or `mode='eval'`",
            TRAIN.replace("mlp", "normal") + " --lr 1e-9 --mode train --batch-size 1",
            use,
            fill,
        )
        for use, fill in (("--batch-size", {"--batch-size": "--batch-size 8"}), ("--mode eval", {}))
    ),
    Case("train with `ema=DECAY`, such as 0.999", TRAIN + " --use-ema", "--ema DECAY", {"DECAY": "0.999"}),
    Case(
        "train adapters with `lora=RANK`",
        "export t.onnx.run/checkpoint.safetensors --model mlp.onnx --adaptable -o e.onnx",
        "--lora RANK",
        {"RANK": "1 --force --run other"},
        TRAINED,
        of_setup=True,
        then="export other/checkpoint.safetensors --model mlp.onnx --adaptable -o e.onnx",
    ),
    Case(
        "name a checkpoint, or train with `onnxgrad train --use-ema`, which writes the averages as the adapter",
        "export a.safetensors --model mlp.onnx --use-ema -o e.onnx",
        "`onnxgrad train --use-ema`",
        {"onnxgrad train": "onnxgrad " + LORA.replace("a.safe", "b.safe").replace("t.onnx", "u.onnx") + " --ema 0.9"},
        (LORA,),
        then="export b.safetensors --model mlp.onnx -o e.onnx",
    ),
    Case(
        "set it with `dims`: NAME=SIZE",
        "train free.onnx --data free.npz --memory 4GB --epochs 1 -o t.onnx",
        "--dim",
        {"--dim": "--dim length=3"},
    ),
    Case(
        "train fewer weights, which changes what is learnt: `freeze=GLOB`, `train_last=N` or `lora=RANK`",
        "train wide.onnx --data wide.npz --memory 26MB --epochs 1 -o t.onnx",
        "--lora RANK",
        {"RANK": "1"},
    ),
    Case(
        "use `classes={}`, which replaces the last layer of the model by one with as many outputs",
        "train mlp.onnx --data names.csv --loss cross-entropy --epochs 1 -o t.onnx",
        "--classes 3",
    ),
    Case(
        "add `max_length=TOKENS`",
        "train tokens.onnx --data tokens.jsonl --pack --loss causal-lm --epochs 1 -o t.onnx",
        "--max-length TOKENS",
        {"TOKENS": "8"},
    ),
    Case(
        "cut them with `max_length={}`, or export the model with a symbolic length",
        "train fixed.onnx --data tokens.jsonl --loss causal-lm --epochs 1 -o t.onnx",
        "--max-length 4",
    ),
    Case(
        "use `batch_size=1` with `accumulate=N`: no padding, and a step takes N samples; or use a model and a loss "
        "that take a mask: an input called mask, and a Python function with a parameter annotated 'mask INPUT'",
        "train free.onnx --data uneven.jsonl --loss mse --epochs 1 -o t.onnx",
        "--batch-size 1 with --accumulate N",
        {" with --accumulate N": " --accumulate 2"},
    ),
    Case(
        "continue with the same options",
        TRAIN + " --train w1 --resume",
        "leave --resume out and add --force",
        {},
        (TRAIN + " --train w2",),
    ),
    Case(
        "continue with the same `lora`",
        TRAIN + " --lora 1:2 --resume",
        "leave --resume out and add --force",
        {},
        (TRAIN + " --lora 1",),
    ),
    Case(
        "continue with the same ones, turn its checkpoint into a model with `onnxgrad export`",
        TRAIN + " --loss mae --resume",
        "leave --resume out and add --force",
        {},
        TRAINED,
    ),
    Case(
        "continue with the same ones, turn its checkpoint into a model with `onnxgrad export`",
        TRAIN + " --loss mae --resume",
        "`onnxgrad export`",
        {"onnxgrad export": "onnxgrad export t.onnx.run/checkpoint.safetensors --model mlp.onnx -o e.onnx"},
        TRAINED,
        then="evaluate e.onnx --data data.npz --loss mse",
    ),
    Case(
        "continue with the same `val` and `metrics`",
        TRAIN + " --val 0.2 --resume",
        "leave --resume out and add --force",
        {},
        (TRAIN + " --val data.npz --metric r2",),
    ),
    Case(
        "continue with the same data",
        TRAIN.replace("data.npz", "others.npz") + " --resume",
        "leave --resume out and add --force",
        {},
        TRAINED,
    ),
    Case(
        ", add `new_data` if only the contents differ",
        TRAIN.replace("data.npz", "others.npz") + " --resume",
        "--new-data",
        {},
        TRAINED,
    ),
    Case(
        "leave `adapter_from` out, and train new adapters with `lora=RANK`",
        TRAIN + " --adapter-from none.safetensors",
        "leave --adapter-from out, and train new adapters with --lora RANK",
        {"RANK": "1"},
    ),
    Case(
        "leave `lora` and `lora_dora` out: the training then takes both from the adapters",
        TRAIN + " --force --run other --lora 1 --lora-dora --adapter-from a.safetensors",
        "leave --lora and --lora-dora out",
        {},
        (LORA,),
    ),
    Case(
        "name it with `lora_target`, too, or leave `lora_target` out",
        TRAIN + " --force --run other --lora 1 --lora-target w1 --adapter-from a.safetensors",
        "leave --lora-target out",
        {},
        (LORA,),
    ),
    Case(
        "name it with `train`",
        TRAIN + " --force --run other --lora 1 --adapter-from a.safetensors",
        "--train",
        {"--train": "--train b1"},
        (LORA + " --train b1",),
    ),
    # other commands
    Case("leave --rules out", "list losses --rules rules.py", "leave --rules out"),
    Case(
        "use .html or .dot, or name the format with `form`",
        "view mlp.onnx -o p.xyz",
        "--format",
        {"--format": "--format dot"},
    ),
    Case("use `out={}`, then run Graphviz: {}", "view mlp.onnx -o p.svg", "--out p.dot"),
    Case(
        "write .npz, .jsonl or .parquet, or name fewer outputs with `outputs`",
        "predict clash.onnx --data data.npz -o p.csv",
        "--output",
        {"--output": "--output y"},
    ),
    Case(
        "name other outputs with `outputs`",
        "predict two.onnx --data data.npz --output total -o p.npz",
        "--output",
        {"--output": "--output y"},
    ),
    Case(
        "make one with `onnxgrad build MODEL`; if this was one, another tool has dropped its metadata",
        "check mlp.onnx",
        "`onnxgrad build MODEL`",
        {"MODEL": "mlp.onnx --loss mse -o t.onnx"},
        then="check t.onnx",
    ),
    Case(
        "pass the model that it was made from; to run it, use `Trainer`, `onnxgrad pack` or onnxruntime",
        "build t.onnx --loss mse -o u.onnx",
        "`onnxgrad pack`",
        {"onnxgrad pack": "onnxgrad pack t.onnx -o site --data data.npz"},
        (BUILD + " --optimizer sgd",),
        then="check t.onnx",
    ),
    Case(
        "write that as separate models with `onnxgrad expand MODEL`, and use the one called step0",
        "check info.onnx",
        "`onnxgrad expand MODEL`",
        {"MODEL": "info.onnx -o parts.onnx"},
        ("build mlp.onnx --loss mse --optimizer sgd --training-info --no-verify -o info.onnx",),
        then="view parts.onnx -o p.html",
    ),
    Case(
        "name the file that `onnxgrad build --weights inputs` wrote beside the training model with `roles`",
        "export new.bin --model mlp.onnx -o e.onnx",
        "--roles",
        {"--roles": "--roles t.json"},
        ("build mlp.onnx --loss mse --no-verify --weights inputs -o t.onnx",),
    ),
    Case(
        "`onnxgrad train` writes them",
        "export other.safetensors --model mlp.onnx -o e.onnx",
        "`onnxgrad train`",
        {"onnxgrad train": "onnxgrad " + TRAIN},
        then="export t.onnx.run --model mlp.onnx -o e.onnx",
    ),
    # with files that only some have
    Case(
        "to read trained values with `onnxgrad export`, name their .bin file",
        "export t.json --model mlp.onnx -o e.onnx",
        "`onnxgrad export`",
        {"onnxgrad export": "onnxgrad export t.bin --model mlp.onnx -o e.onnx"},
        ("build mlp.onnx --loss mse --no-verify --weights inputs -o t.onnx", "$ cp new.bin t.bin"),
        then="evaluate e.onnx --data data.npz --loss mse",
    ),
    Case(
        "keep the files of `onnxgrad build --weights inputs` in one folder, and name the model's file",
        "check t.onnx",
        "`onnxgrad build --weights inputs`",
        {"onnxgrad build": "onnxgrad build mlp.onnx --loss mse --no-verify -o t.onnx"},
        ("build mlp.onnx --loss mse --no-verify --weights inputs -o t.onnx", "$ rm t.json t.bin"),
        then="check t.onnx",
    ),
    Case(
        "`onnxgrad train` writes them; leave `resume` out, and name another folder with `run`",
        TRAIN + " --resume",
        "leave --resume out, and name another folder with --run",
        {"--run": "--run other"},
        (
            "build mlp.onnx --loss mse --optimizer sgd --no-verify --artifacts dir",
            "$ mkdir t.onnx.run && cp dir/checkpoint t.onnx.run/checkpoint.safetensors",
        ),
    ),
    Case(
        "leave `use_ema` out",
        "export dir/checkpoint --model mlp.onnx --use-ema -o e.onnx",
        "leave --use-ema out",
        {},
        ("build mlp.onnx --loss mse --optimizer sgd --ema 0.9 --no-verify --artifacts dir",),
    ),
    Case(
        "pass another folder as `run`",
        TRAIN,
        "--run",
        {"--run": "--run other"},
        ("$ touch t.onnx.run",),
    ),
    Case(
        "pass another folder as `run`",
        TRAIN + " --log tensorboard",
        "--run",
        {"--run": "--run other"},
        ("$ mkdir t.onnx.run && ln -s /tmp t.onnx.run/tensorboard",),
    ),
    Case(
        "make one with `onnxgrad build MODEL`; models of initializations and of other tools can't be used here",
        "check parts.init0.onnx",
        "`onnxgrad build MODEL`",
        {"MODEL": "mlp.onnx --loss mse --no-verify -o t.onnx"},
        (
            "build mlp.onnx --loss mse --optimizer sgd --training-info --no-verify -o info.onnx",
            "expand info.onnx -o parts.onnx",
        ),
        then="check t.onnx",
    ),
    Case(
        "fix it with `shapes={}:DIM,DIM,...`, such as {}:batch,3,224,224",
        "train seen.onnx --data pictures --loss cross-entropy --epochs 1 -o t.onnx",
        "--shape x:DIM,DIM,...",
        {"x:DIM,DIM,...": "x:batch,3,8,8"},
    ),
    Case(
        "use a classification loss: `losses='cross-entropy'`",
        "train seen.onnx --data pictures --shape x:batch,3,8,8 --loss mse --epochs 1 -o t.onnx",
        "--loss cross-entropy",
    ),
    Case(
        "choose one of them, such as '{}', and another with `val`",
        "train seen.onnx --data splits --shape x:batch,3,8,8 --loss cross-entropy --epochs 1 -o t.onnx",
        "--val",
        {"--val": "--val splits/val --data splits/train"},
    ),
    Case(
        "pass a `tokenizer` for the text in {}",
        "train tokens.onnx --data text.jsonl --loss causal-lm --epochs 1 -o t.onnx",
        "--tokenizer",
        {"--tokenizer": "--tokenizer tokenizer.json"},
    ),
    # operators
    Case(
        "choose weights with `train=GLOB`",
        "build constant.onnx --loss mse --no-verify -o t.onnx",
        "--train GLOB",
        {"GLOB": "w"},
    ),
    Case(
        "freeze the weights before it with `freeze`",
        "build minors.onnx --loss mse --no-verify -o t.onnx",
        "--freeze",
        {"--freeze": "--freeze w"},
    ),
    Case(
        "pass `quantization='ste'` to use the straight-through estimator, or start from the float model",
        "build dynamic.onnx --loss mse --no-verify -o t.onnx",
        "--quantization ste",
    ),
    Case(
        "quantize the float model statically, with QuantizeLinear and DequantizeLinear, or leave the weight as it is "
        "with `freeze={}`",
        "train dynamic.onnx --data three.npz --quantization ste --epochs 1 -o t.onnx",
        "--freeze wi_1",
    ),
    Case(
        "train the scales that can be trained with `quantization='lsq'`",
        "train integers.onnx --data three.npz --quantization ste --train s --epochs 1 -o t.onnx",
        "--quantization lsq",
    ),
    Case(
        "the model was not written; to write it without a proof, leave `verify=True` out",
        "build rounded.onnx --loss mse --quantization ste --verify -o t.onnx",
        "leave --verify out",
    ),
    Case(
        "nothing was written; to continue without a proof, leave `verify=True` out",
        "derive rounded.onnx --kind vjp --wrt x --quantization ste --verify -o t.onnx",
        "leave --verify out",
    ),
    Case(
        "{}; or freeze it with `freeze`",
        "build node.onnx --loss mse --optimizer sgd --training-info --no-verify -o t.onnx",
        "--freeze",
        {"--freeze": "--freeze w"},
    ),
    Case(
        "name other weights with `lora_target`, choose a smaller rank, or train these weights fully with `train`",
        BUILD + " --lora 64",
        "choose a smaller rank",
        {"choose a smaller rank": "--lora 1"},
    ),
    Case(
        "choose a class from 0 to {}, or set another axis with `class_axis`",
        "derive places.onnx --kind vjp --class 7 --wrt x -o t.onnx",
        "--class-axis",
        {"--class-axis": "--class-axis 2"},
    ),
    Case(
        "choose an output of scores with `of`, or set the axis of classes with `class_axis`",
        "derive scores.onnx --kind vjp --class 0 --of flat --wrt x -o t.onnx",
        "--of",
        {"--of": "--of y"},
    ),
    Case(
        "choose a float value inside the model, such as `wrt={}`",
        "explain whole.onnx --data whole.npz --class 0 -o a.npz",
        "--wrt h",
    ),
    Case(
        "use a single batch for all samples with `batch_size`, or batches of one length",
        "predict tokens.onnx --data tokens.jsonl --batch-size 1 -o p.npz",
        "--batch-size",
        {"--batch-size": "--batch-size 100"},
    ),
]

EXEMPT = {
    "a rank or a size that nobody knows: whether shapes help depends on the model": (
        "set the unknown sizes with `dims` or `shapes`",
        "give the node N // 2 + 1 bins, and make its sizes static with `dims` or `shapes`",
        "choose another value, or set shapes with `shapes`",
        "set the same size with `shapes`; save an input that is the same for all samples with its declared shape",
        "use batches of {}, or build the model with `dims` or `shapes` for another size",
        "export the model again, or use `dims` to set sizes that are symbolic by mistake: {}",
    ),
    "a fault of onnxgrad, of memory or of native code": (
        "the model was not written; `verify=False` writes it without checks",
        "nothing was written; `verify=False` skips the checks",
        "this is a bug in onnxgrad: run the command again with --traceback, and report the output at {}",
        "export the model again, or check the data; --traceback shows where it happened",
        "close other programs, raise the limit, or use a smaller model, smaller batches or smaller --dim sizes",
    ),
    "reached from Python alone: no option of a command leads there": (
        "leave `target` out",
        "name another file, or replace it with `force=True`",
        "make .ort files of them with python -m onnxruntime.tools.convert_onnx_models_to_ort",
        "set `mode`, or write the batch statistics as separate nodes",
        "build it with `cycle_momentum=True`",
        "build with `mode='train'`, which adds the output, or with `mode='eval'`, which removes the Dropout",
        "continue with the same `metrics` in the same order",
    ),
    "several processes, tested in tests/training/steps/test_parallel.py and tests/training/distributed": (
        "use `reduction='mean'`, or {}",
        "use `reduction='sum'`, or a single loss",
        "systems kill a process when memory is full; `resume` continues from the last checkpoint of the run",
    ),
    "losses whose numbers of labels differ, tested in tests/jobs/train/test_lbfgs_options.py": (
        "use a `batch_size` of all samples, or a single loss",
    ),
    "files changed by hand or damaged, tested where they are read": (
        "write a model from the last checkpoint, '{}', with `onnxgrad export`, or {}",
        "it is damaged: use another copy, or {}",
        "choose one with `lora=RANK:ALPHA`",
        "pass other numbers with `normalize`: they replace those that the model stores",
        "choose one of '{}' and '{}' with `outputs`",
    ),
    "followed in tests/files/test_external_data.py": (
        "if you trust the model, copy the file: cp {} {} && mv -f {} {}",
    ),
    "what the user must look at or export again, and no repair": (
        ": pass the original model with --original",
        "check labels and `max_length`",
        "train it with a smaller learning rate, `group={}`, or freeze it, `freeze={}`",
        "choose an output before the trees with `output=NAME`, and train the trees with the library that created them",
    ),
    "another build of onnxruntime, for a device that the machine may lack": (
        "run pip uninstall -y onnxruntime && pip install {}; the installed onnxruntime has {}",
    ),
    "models of derivatives, tested in tests/derivatives": (
        "build the derivatives again with `mode={}`, from the model without derivatives",
        "run the other tool on the model without derivatives, then add them again with `onnxgrad derive` or "
        "`onnxgrad expand`; if you added the tensors yourself, remove the entry '{}' from the model's metadata",
    ),
    "a choice of samples of many": (
        "choose samples of one length with `sample`",
        "choose fewer samples with `sample`, or write .npz",
    ),
    "adapters of functions, of integers and of DoRA, tested in tests/adapters": (
        "leave `merge` out: the model then computes the adapter separately",
        "use `test_data` to pass data that the model can run on",
        "freeze it with `freeze` '{}', or inline functions with onnx.inliner.inline_local_functions first",
        "name other weights with `lora_target`, or inline functions with onnx.inliner.inline_local_functions",
        "write a .safetensors file or a folder of PEFT, or merge them into the model with `onnxgrad export`",
        "write the trained model itself with `onnxgrad export`",
    ),
}
"""Hints without a case, by the reason."""

HEAD = '<ir_version: 8, opset_import: ["": 17]>\n'
MODELS = {
    "mlp.onnx": MLP,
    "bare.onnx": NO_WEIGHTS,
    "old.onnx": MLP.replace('"": 17', '"": 8'),
    "integers.onnx": HEAD + """m (float[batch, 4] x) => (float[batch, 3] y)
<int8[4, 3] w = {1, -2, 3, 4, 5, -6, 7, 8, 9, -1, 2, 3}, float s = {0.3}>
{ d = DequantizeLinear(w, s) y = MatMul(x, d) }""",
    "rounded.onnx": HEAD + """m (float[batch, 4] x) => (float[batch, 3] y)
<float[4, 3] w = {1, -2, 3, 4, 5, -6, 7, 8, 9, -1, 2, 3}, float s = {0.3}, int8 z = {0}>
{ h = MatMul(x, w) q = QuantizeLinear(h, s, z) y = DequantizeLinear(q, s, z) }""",
    "two.onnx": HEAD + """m (float[batch, 4] x) => (float[batch, 3] y, float[batch, 4] z, float total)
<float[4, 3] w = {1, -2, 3, 4, 5, -6, 7, 8, 9, -1, 2, 3}>
{ y = MatMul(x, w) z = Sigmoid(x) total = ReduceSum <keepdims = 0> (y) }""",
    "gradient.onnx": HEAD.replace('17]', '17, "ai.onnx.preview.training": 1]')
    + """m (float[batch, 2] x) => (float[batch, 2] z)
<float[2] w = {2, 3}> { h = Mul(x, w) y = Mul(h, h)
  z = ai.onnx.preview.training.Gradient <xs = ["h"], y = "y"> (h) }""",
    "constant.onnx": HEAD + "m (float[batch, 2] x) => (float[batch, 2] y) <float w = {2}> { y = Mul(x, w) }",
    "node.onnx": HEAD + """m (float[batch, 2] x) => (float[batch, 2] y)
<float[2] v = {2, 3}> { w = Constant <value = float[2] {1, 2}> () h = Mul(x, w) y = Mul(h, v) }""",
    "dynamic.onnx": HEAD + """m (float[batch, 4] x) => (float[batch, 3] y)
<float[4] w = {1, 2, 3, 4}, int8[4, 3] wi = {1, -2, 3, 4, 5, -6, 7, 8, 9, -1, 2, 3}, float s = {0.1}>
{ h = Mul(x, w) q, qs, qz = DynamicQuantizeLinear(h) p = MatMulInteger(q, wi, qz) f = Cast <to = 1> (p)
  m = Mul(qs, s) y = Mul(f, m) }""",
    "places.onnx": HEAD + """m (float[batch, 2, 9] x) => (float[batch, 2, 9] y) { y = Sigmoid(x) }""",
    "whole.onnx": HEAD + """m (int64[batch, 4] x) => (float[batch, 2] y)
<float[4, 2] w = {1, -2, 3, 4, 5, -6, 7, 8}> { h = Cast <to = 1> (x) y = MatMul(h, w) }""",
    "seen.onnx": HEAD + """m (float[batch, 3, height, width] x) => (float[batch, 2] y)
<float[3, 2] w = {1, -2, 3, 4, 5, -6}> { p = GlobalAveragePool(x) f = Flatten(p) y = MatMul(f, w) }""",
    "turned.onnx": HEAD + """m (float[batch, 2] x) => (float[batch, 2] y, float[2, batch] z)
{ y = Sigmoid(x) z = Transpose(y) }""",
    "scores.onnx": HEAD + """m (float[batch, 4] x) => (float[batch, 2] y, float[batch, 1] one, float[batch] flat)
<float[4, 2] w = {1, -2, 3, 4, 5, -6, 7, 8}, float[4, 1] v = {1, -2, 3, 4}, int64[1] last = {1}>
{ y = MatMul(x, w) one = MatMul(x, v) flat = Squeeze(one, last) }""",
    "pooled.onnx": HEAD + """m (float[batch, 1, 3, 3] x) => (float[batch, 2] y)
<float[9, 2] w = {1, -2, 3, 4, 5, -6, 7, 8, 9, -1, 2, 3, 1, 1, 1, 0, 2, 2}>
{ h = Sigmoid(x) f = Flatten(h) y = MatMul(f, w) }""",
    "mixed.onnx": HEAD + """m (int64[batch, 2] ids, float[batch, 2] x) => (float[batch, 2] y)
{ h = Cast <to = 1> (ids) y = Mul(h, x) }""",
    "looked.onnx": HEAD + """m (int64[batch, 2] ids) => (float[batch, 2] y)
<float[3, 2] table = {1, -2, 3, 4, 5, 6}, int64[1] along = {1}>
{ rows = Gather(table, ids) y = ReduceSum<keepdims = 0>(rows, along) }""",
    "total.onnx": HEAD + """m (float[batch, 4] x) => (float total) { total = ReduceSum <keepdims = 0> (x) }""",
    "sides.onnx": HEAD + """m (float[batch, 2] x, float[batch, 2] z) => (float[batch, 2] y) { y = Mul(x, z) }""",
    "free.onnx": HEAD + """m (float[batch, length, 4] x) => (float[batch, length, 4] y)
<float[4] w = {1, -2, 3, 4}> { y = Mul(x, w) }""",
    "rows.onnx": HEAD + """m (float[batch, 1, 4] x) => (float[batch, 1, 4] y)
<float[4] w = {1, -2, 3, 4}> { y = Mul(x, w) }""",
    "clash.onnx": HEAD + """m (float[batch, 4] x) => (float[batch, 4] y, float[batch] y_0)
<float[4] w = {1, -2, 3, 4}, int64[1] last = {1}> { y = Mul(x, w) y_0 = ReduceMean <axes = [1], keepdims = 0> (y) }""",
    "normal.onnx": HEAD + """m (float[batch, 4] x) => (float[batch, 2] y)
<float[4] o = {1, 1, 1, 1}, float[4] z = {0, 0, 0, 0}, float[4, 2] w = {1, -2, 3, 4, 5, -6, 7, 8}>
{ n = BatchNormalization(x, o, z, z, o) y = MatMul(n, w) }""",
    "tokens.onnx": HEAD + """m (int64[batch, length] input_ids) => (float[batch, length, 3] logits)
<float[3, 3] w = {1, -2, 3, 4, 5, -6, 7, 8, 9}> { logits = Gather(w, input_ids) }""",
    "fixed.onnx": HEAD + """m (int64[batch, 4] input_ids) => (float[batch, 4, 3] logits)
<float[3, 3] w = {1, -2, 3, 4, 5, -6, 7, 8, 9}> { logits = Gather(w, input_ids) }""",
}  # fmt: skip


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path, capsys)


def provide(words: str) -> None:
    """Write the files that commands name."""
    random = np.random.default_rng(0)

    def floats(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(np.float32)

    for name in MODELS.keys() & set(shlex.split(words)):
        save(MODELS[name], Path(name))
    if "wide.onnx" in words:
        model = onnx.parser.parse_model(
            HEAD + "m (float[batch, 1000] x) => (float[batch, 1000] y) { y = MatMul(x, w) }"
        )
        model.graph.initializer.append(onnx.numpy_helper.from_array(floats(1000, 1000), "w"))
        onnx.save(model, "wide.onnx")
        np.savez("wide.npz", x=floats(4, 1000), label=floats(4, 1000))
    if "minors.onnx" in words:
        model = onnx.parser.parse_model(
            HEAD + "m (float[batch, 128, 128] x) => (float[batch, 3] y) <float[3] v = {1, 2, 3}, int64[1] last = {1}>"
            "{ h = MatMul(x, w) d = Det(h) u = Unsqueeze(d, last) y = Mul(u, v) }"
        )
        model.graph.initializer.append(onnx.numpy_helper.from_array(floats(128, 128), "w"))
        onnx.save(model, "minors.onnx")
    if "pictures" in words or "splits" in words:
        image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
        for folder in (
            "pictures/a",
            "pictures/b",
            *(f"splits/{part}/{name}" for part in ("train", "val") for name in "ab"),
        ):
            Path(folder).mkdir(parents=True)
            image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(f"{folder}/1.png")
    if "tokenizer.json" in words:
        tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
        made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a"))
        made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        made.save("tokenizer.json")
    if "tensorboard" in words:
        pytest.importorskip("tensorboardX", reason="tensorboardX is not installed")
    np.savez("data.npz", x=floats(50, 4), label=floats(50, 2))
    np.savez("ignored.npz", x=floats(50, 4), label=np.arange(50) % 3 - 1)
    np.savez("three.npz", x=floats(50, 4), label=floats(50, 3))
    np.savez("whole.npz", x=np.ones((5, 4), np.int64))
    Path("text.jsonl").write_text('{"text": "a b c a"}\n' * 4)
    np.savez("others.npz", x=floats(50, 4), label=floats(50, 2))
    np.savez("pooled.npz", x=floats(3, 1, 3, 3))
    np.savez("mixed.npz", ids=np.ones((3, 2), np.int64), x=floats(3, 2))
    np.savez("looked.npz", ids=np.array([[0, 1], [2, 1]]))
    np.savez("sides.npz", x=floats(3, 2), z=floats(3, 2))
    np.savez("free.npz", x=floats(5, 3, 4), label=floats(5, 3, 4))
    Path("names.csv").write_text("x_0,x_1,x_2,x_3,label\n" + "".join(f"1,2,3,4,{name}\n" for name in "abcabc"))
    Path("tokens.jsonl").write_text('{"input_ids": [0, 1, 2, 1, 0, 1]}\n{"input_ids": [0, 1, 2]}\n' * 4)
    points = [[[1.0, 2.0, 3.0, 4.0]] * size for size in (1, 2)]
    Path("uneven.jsonl").write_text("".join(f'{{"x": {each}, "label": {each}}}\n' for each in points))
    Path("bad.toml").write_text("a = 1\n")
    Path("mine.onnx").write_bytes(Path("mlp.onnx").read_bytes() if Path("mlp.onnx").exists() else b"")
    Path("mine").mkdir()
    Path("mine/adapter_config.json").write_text("{}")
    Path("new.bin").write_bytes(bytes(4 * (12 + 4 + 6)))
    from onnxgrad_cli.checkpoints.tensors import save_tensors

    save_tensors(Path("none.safetensors"), {"w": floats(2)}, {"onnxgrad.adapters": []})
    save_tensors(Path("other.safetensors"), {"w": floats(2)}, {"onnxgrad.base": ""})


OPTION = re.compile(r"--[a-z][\w-]*")


def followed(command: str, use: str, fill: Mapping[str, str]) -> str:
    """The command with the options of a hint in it, and without those that the hint leaves out."""
    words, text = shlex.split(command), filled(use, fill)
    left = re.match(r"leave .*? out|leave out --[a-z-]+|without .*", text)
    for option in OPTION.findall(left[0] if left else ""):
        at = words.index(option)
        flag = at + 1 == len(words) or words[at + 1].startswith("-")
        del words[at : at + (1 if flag else 2)]
    added = OPTION.search(text, left.end() if left else 0)
    given = shlex.split(text[added.start() :]) if added else []
    for option in (word for word in given if word.startswith("--")):
        named = {"--out": "-o"}.get(option, option)
        if named in words:
            at = len(words) - 1 - words[::-1].index(named)  # the last of several
            del words[at : at + 2]
    return shlex.join([*words, *given])


def filled(text: str, fill: Mapping[str, str]) -> str:
    for placeholder, value in fill.items():
        assert placeholder in text, f"the hint has no {placeholder}"
        text = text.replace(placeholder, value)
    return text


def run(shell: Shell, command: str) -> Result:
    return shell(*shlex.split(command))


def message(result: Result) -> str:
    return next(line for line in result.err.splitlines() if line.startswith("error: "))


def pattern(hint: str) -> str:
    """A regular expression for what a hint of the source prints."""
    return re.escape(as_cli_flags(hint)).replace(r"\{\}", ".*")


@pytest.mark.thinned(6, 3)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.hint[:50]}-{case.use[:20]}")
def test_following_the_hint_removes_the_error(case: Case, shell: Shell) -> None:
    provide(" ".join([*case.setup, case.command, case.then, *case.fill.values()]))
    for command in case.setup:
        if command.startswith("$ "):
            subprocess.run(["sh", "-ec", command[2:]], check=True)
        else:
            assert (done := run(shell, command)).code == 0, done.err
    failed = run(shell, case.command)
    assert failed.code not in (0, 130), failed.err
    hints = "\n".join(line for line in failed.err.splitlines() if line.startswith("hint: "))
    assert re.search(pattern(case.hint), hints), failed.err
    assert case.use in hints, failed.err
    if not case.of_setup and OPTION.search(case.use) and "onnxgrad " not in case.use:
        assert followed(case.command, case.use, case.fill) != case.command, "the hint repeats what was given"
    if "onnxgrad " in case.use:
        done = run(shell, filled(case.use.strip("`'"), case.fill).removeprefix("onnxgrad "))
        assert done.code == 0, done.err
        done = run(shell, case.then)
    elif case.of_setup:
        done = run(shell, followed(case.setup[-1], case.use, case.fill))
        assert done.code == 0, done.err
        done = run(shell, case.then or case.command)
    elif case.use == "name a file":
        done = run(shell, case.command.replace("/dev/null", "file.onnx"))
    else:
        done = run(shell, followed(case.command, case.use, case.fill))
    assert message(failed) not in done.err, "the same error returns"
    assert done.code == 0, done.err


@pytest.mark.parametrize(
    ("name", "package"), [("cuda", "onnxruntime-gpu"), ("TensorrtExecutionProvider", "onnxruntime-gpu")]
)
def test_a_provider_of_another_build(name: str, package: str, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hint names the package, and no provider that happens to be spelt alike."""
    provide("mlp.onnx")
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: ["CPUExecutionProvider"])
    failed = run(shell, f"evaluate mlp.onnx --data data.npz --loss mse --provider {name}")
    assert failed.code == 2 and f"&& pip install {package};" in failed.hint and "cpu" in failed.hint, failed.err


# -- the hints in the source ----------------------------------------------------------------------------------

PLACES = {"OnnxgradError": 1, "UsageError": 1, "CheckFailed": 1, "InternalError": 1, "UnsupportedError": 2,
          "Refusal": 3, "no": 1, "refuse": 2, "conflicts": 2, "require": 2, "of_type": 4}  # fmt: skip
PLACES |= {name: 1 for name, each in vars(errors).items() if isinstance(each, partial)}
"""Calls that take a hint -> its place among the arguments."""

COMMAND = re.compile(r"--[a-z]|(^|\W)-o |pip install|onnxgrad [a-z]|\bcp |python -m")


def texts(node: ast.expr | None, constants: Mapping[str, ast.expr]) -> Iterator[str]:
    """The texts in an expression; what is formatted into one is {}."""
    if isinstance(node, ast.Name) and node.id in constants:
        yield from texts(constants[node.id], {})
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
    elif isinstance(node, ast.IfExp):
        yield from (*texts(node.body, constants), *texts(node.orelse, constants))
    elif isinstance(node, ast.BinOp):
        yield from (*texts(node.left, constants), *texts(node.right, constants))


def hints_in(path: Path) -> Iterator[str]:
    """The hints of a module."""
    tree = ast.parse(path.read_text())
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        found: list[ast.expr | None] = []
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", None) or getattr(node.func, "id", "")
            found += [keyword.value for keyword in node.keywords if keyword.arg == "hint"]
            found += node.args[PLACES[name] : PLACES[name] + 1] if name in PLACES else []
        elif isinstance(node, (ast.Assign, ast.AugAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found += [node.value] if any(getattr(each, "id", "") == "hint" for each in targets) else []
        yield from (text for each in found for text in texts(each, constants))


def names_option(hint: str) -> bool:
    """Return True if a hint names an option or a command."""
    arguments = re.findall(r"`([a-z][a-z0-9_]*)(?:=[^`]*)?`", hint)
    return bool(COMMAND.search(hint) or FLAGS.keys() & arguments)


def test_each_hint_has_a_case() -> None:
    assert all(command.params for command in cli.commands.values())  # loads the declarations, for FLAGS
    there = {hint for path in SOURCE.rglob("*.py") for hint in hints_in(path)}
    wanted, covered = set(filter(names_option, there)), {case.hint for case in CASES}
    exempt = {hint for hints in EXEMPT.values() for hint in hints}
    assert len(wanted) > 100 and len(exempt) < len(wanted) / 3
    assert sorted((covered | exempt) - there) == [], "the source has no such hint any more"
    assert sorted(covered & exempt) == []
    assert sorted(wanted - covered - exempt) == [], "cause the error in a case, and follow the hint"
