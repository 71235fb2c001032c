"""Options are checked when they are made, and against the model when it is built."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from onnxgrad_cli import (
    LossSpec,
    Options,
    UsageError,
    build,
)
from tests.test_api import model

WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "a keyword": ({"optimiser": "adam"}, "`Options` has no option 'optimiser'", "did you mean optimizer or "),
    "a keyword like none": ({"zzz": 1}, "`Options` has no option 'zzz'", "options: losses, label, output, "),
    "mode": ({"mode": "Train"}, "`mode='Train'` is none of 'keep', 'train' and 'eval'", "did you mean 'train'?"),
    "reduction": ({"reduction": "avg"}, "`reduction='avg'` is none of 'mean' and 'sum'", "'mean', 'sum'"),
    "quantization": ({"quantization": "STE"}, "`quantization='STE'` is none of", "did you mean 'ste'?"),
    "init": ({"init": "kaiming"}, "`init='kaiming'` is none of", "'xavier', 'he'"),
    "yield": ({"yield_": "one"}, "`yield_='one'` is none of", "did you mean 'ones'?"),
    "dims": ({"dims": {"batch": -3}}, "`dims`: 'batch' can't have size -3", "1 or more"),
    "no size": ({"dims": {"batch": True}}, "`dims`: 'batch' can't have size True", "1 or more"),
    "dims of another type": ({"dims": [("batch", 3)]}, "`dims=[('batch', 3)]`: expected a dict, got a list", "batch"),
    "a key": ({"dims": {3: 3}}, "`dims`: the key 3 is not a string", "batch"),
    "shapes": ({"shapes": {"x": (0, 3)}}, "`shapes`: 'x' can't have size 0", "1 or more"),
    "one size": ({"shapes": {"x": 3}}, "`shapes=3`: expected a tuple, got an int", "shapes="),
    "a run": ({"infer_by_run": 3}, "`infer_by_run=3`: expected True or False", ""),
    "a pattern": ({"train": "*.bias"}, "`train='*.bias'`: expected a tuple, got a str", "train=('*.bias',)"),
    "patterns": ({"freeze": (3,)}, "`freeze`: 3 is not a str", "freeze="),
    "preset": ({"preset": ("biases",)}, "`preset='biases'` is none of", "did you mean 'bias'?"),
    "train_last": ({"train_last": -1}, "`train_last=-1`: expected a whole number of 1 or more", ""),
    "lora": ({"lora": 8}, "`lora=8`: expected LoraSpec(rank) or None, got an int", ""),
    "recompute": ({"recompute": "elementwise"}, "`recompute='elementwise'`: expected RecomputeSpec('elementwise')", ""),
    "loss_chunks": ({"loss_chunks": 0}, "`loss_chunks=0`: expected a whole number of 1 or more", ""),
    "a loss by a wrong name": ({"losses": "mze"}, "there is no loss 'mze'", "did you mean mse"),
    "code in a string": (
        {"losses": "my.py:focal"},
        "`losses` 'my.py:focal' refers to code in a file",
        "pass the function itself",
    ),
    "a number for a loss": ({"losses": 3}, "`losses=3`: expected a tuple, got an int", "LossSpec('mse')"),
    "a loss of one parameter": (
        {"losses": lambda op: op},
        "the loss '<lambda>' has the parameters op",
        "function(op, prediction",
    ),
    "no loss": ({"losses": ()}, "`losses` is empty", "LossSpec('mse')"),
    "label": ({"label": None}, "`label=None`: expected a string, got a NoneType", ""),
    "output": ({"output": 0}, "`output=0`: expected a string or None, got an int", ""),
    "l1": ({"l1": -0.5}, "`l1=-0.5`: expected a finite number of 0 or more", ""),
    "l2": ({"l2": float("nan")}, "`l2=nan`: expected a finite number of 0 or more", ""),
    "optimizer": ({"optimizer": "adamm"}, "there is no optimizer 'adamm'", "adam"),
    "no optimizer": ({"optimizer": None}, "`optimizer=None`: expected a string", ""),
    "group": ({"group": (("*", {}),)}, "`group`: ('*', {}) is not a Group", "Group('*.bias'"),
    "clip_norm": ({"clip_norm": 0}, "`clip_norm=0`: expected a finite number above 0", ""),
    "clip_value": ({"clip_value": "1"}, "`clip_value='1'`: expected a finite number above 0", ""),
    "two bounds": ({"clip_norm": 1, "clip_value": 1}, "`clip_norm` can't be combined with `clip_value`", "leave one"),
    "accumulate": ({"accumulate": 1.5}, "`accumulate=1.5`: expected a whole number of 1 or more", ""),
    "loss_scale": ({"loss_scale": "dynamo"}, "`loss_scale` takes a number above 0 or 'dynamic', not 'dynamo'", "1024"),
    "ema": ({"ema": 1}, "`ema=1`: expected a finite number of 0 or more and below 1", "0.999"),
    "embed_state": ({"embed_state": 1}, "`embed_state=1`: expected True or False, got an int", ""),
    "cycle_momentum": ({"cycle_momentum": 1}, "`cycle_momentum=1`: expected True or False, got an int", ""),
    "seed": ({"seed": 1 << 24}, "`seed=16777216`: expected a whole number from 0 to 16777215", ""),
    "target": ({"target": "ort"}, "`target='ort'` is none of", "did you mean 'ort-cpu'"),
    "another type of word": ({"mode": True}, "`mode=True` is none of", "expected one of 'keep', 'train' and 'eval'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_option_is_refused_when_it_is_made(case: str) -> None:
    given, message, hint = WRONG[case]
    with pytest.raises(UsageError) as found:
        Options(**given)
    assert message in str(found.value) and hint in (found.value.hint or "")
    assert not re.search(r"--[a-z]", f"{found.value} {found.value.hint}")  # no flags
    assert found.value.hint is None or found.value.__notes__ == [f"hint: {found.value.hint}"]  # in a traceback
    with pytest.raises(UsageError):
        replace(Options(), **given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train": ("*.bais",)}, "`train`: '*.bais' matches no float weight"),
        ({"freeze": ("q",)}, "`freeze`: 'q' matches no float weight"),
        ({"grad_of_input": ("z",)}, "`grad_of_input`: 'z' matches no float input"),
        ({"preset": ("norm",)}, "`preset='norm'` selects no weight"),
        ({"train_last": 9}, "`train_last=9` is out of range: the model has 1 layer"),
        ({"dims": {"m": 3}}, "`dims`: no input has a dimension 'm'"),
        ({"shapes": {"z": (3,)}}, "`shapes`: the model has no input 'z'"),
        ({"output": "z"}, "the model has no output 'z'"),
        ({"label": "x"}, "`label`: the model already has a value or a node called 'x'"),
        ({"ema": 0.9}, "`ema` requires an optimizer"),
        ({"lora_target": ("w",)}, "`lora_target` requires adapters"),
        ({"target": "ort-cpu", "as_gradient_op": True}, "`target='ort-cpu'` can't be combined with `as_gradient_op`"),
        (
            {"loss_scale": "dynamic"},
            "`loss_scale='dynamic'` requires an optimizer, because it adapts the scale at each step",
        ),
    ],
)
def test_what_does_not_fit_the_model_is_told_in_the_same_words(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as found:
        build(model(), Options(**options))
    assert message in str(found.value)
    assert not re.search(r"--[a-z]", f"{found.value} {found.value.hint}")


def test_lists_do_for_tuples_and_numbers_of_numpy_for_numbers() -> None:
    options = Options(train=["w"], losses=[LossSpec("mse")], preset=["bias"], l1=np.float32(0.5))  # type: ignore[arg-type]
    assert (options.train, options.losses, options.preset) == (("w",), (LossSpec("mse"),), ("bias",))
    assert build(model(), Options(optimizer="sgd", accumulate=np.int64(2))).training.trained == ["w", "b"]
