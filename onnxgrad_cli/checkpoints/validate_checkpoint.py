"""Validate the metadata of checkpoints and the lines of logs before they are used.

Checksums detect damaged files. This validation detects files that were written with invalid entries, such as null for a
count or a list for an object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from onnxgrad_cli.common.checks import is_number
from onnxgrad_cli.common.choices import Scaling
from onnxgrad_cli.errors import OnnxgradError, conflict, unknown_name, unreadable, wrong_type
from onnxgrad_cli.metadata import Adapter, IntegerWeight

Form = Callable[[Any], bool]

Ended = Literal["", "converged", "no lower loss"]
"""The reasons for which an optimizer ends a run before its last epoch."""

MOST_STEPS = 2**53
"""The largest valid count of steps, samples or epochs, larger than any run can reach."""


def _count(value: Any) -> bool:
    return is_number(value, 0, whole=True) and value <= MOST_STEPS


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _names(value: Any) -> bool:
    return isinstance(value, list) and all(map(_text, value))


def _pairs(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_text, value.values()))


def _float(value: Any) -> bool:
    """Return True for numbers, including NaN and infinity, because a metric may be undefined.

    `is_number` rejects integers that are too large for a float.
    """
    return isinstance(value, float) or is_number(value)


def are_adapters(value: Any) -> bool:
    """Return True if a value is a valid list of adapters, as in the metadata of checkpoints and adapter files."""
    forms: dict[str, Form] = {
        "weight": _text, "a": _text, "b": _text, "rank": _count, "alpha": is_number,
        "scaling": lambda value: value in get_args(Scaling), "magnitude": lambda value: isinstance(value, str),
    }  # fmt: skip
    assert set(forms) == {field.name for field in fields(Adapter)}
    usual = {"scaling": "lora", "magnitude": ""}
    return isinstance(value, list) and all(
        isinstance(each, dict) and _has({**usual, **each}, forms) and each["rank"] > 0 for each in value
    )


def _quantized(value: Any) -> bool:
    """Return True if a value validly describes the weights that are trained as floats and stored as integers."""
    forms: dict[str, Form] = {
        "weight": _text, "tensor": _text, "scale": _text, "zero_point": _text, "factors": _names, "times": is_number,
        "axis": lambda value: is_number(value, whole=True), "block_size": _count,
    }  # fmt: skip
    assert set(forms) == {field.name for field in fields(IntegerWeight)}

    def are_weights(value: Any) -> bool:
        return isinstance(value, list) and all(_has(each, forms) for each in value)

    known: dict[str, Form] = {"weights": are_weights, "scales": _names, "copies": _pairs, "transposed": _names}
    return isinstance(value, dict) and _has({"transposed": [], **value}, known)


def _epochs(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(epoch, dict) and "loss" in epoch and all(map(_float, epoch.values())) for epoch in value
    )


def _run(value: Any) -> bool:
    forms: dict[str, Form] = {
        "epochs": _epochs, "best": _count, "total": _float, "seen": _count, "uncounted": _count,
        "ended": lambda value: value in get_args(Ended),
    }  # fmt: skip
    usual = {"uncounted": 0, "ended": ""}
    return isinstance(value, dict) and _has({**usual, **value}, forms) and value["best"] <= len(value["epochs"])


def _place(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(each, bool) or _count(each) for each in value.values())


def _has(value: Any, forms: Mapping[str, Form]) -> bool:
    return isinstance(value, dict) and value.keys() == forms.keys() and all(form(value[n]) for n, form in forms.items())


COMMON: dict[str, Form] = {"steps": _count, "weights": _names, "adapters": are_adapters}
"""Entry that every checkpoint must have -> a function that returns True for a valid value."""

ANEW = "leave `resume` out and add `force=True`, which replaces the run, or `run=DIR`, which keeps it"
"""The hint of errors about a run that can't be continued."""

OF_A_RUN: dict[str, Form] = {
    "batches": _place, "schedule": lambda value: isinstance(value, dict), "run": _run, "watched": _text,
    "model": _text, "data": _pairs,
}  # fmt: skip
"""Further entry that a checkpoint must have if a run is to continue from it -> a function as in `COMMON`."""

OPTIONAL: dict[str, Form] = {
    "averages": _pairs, "quantized": _quantized, "frozen": _names, "state": _names, "writer": _text, "base": _text,
    "rates": _text, "settings": _pairs, "untrained": _pairs,
}  # fmt: skip


def check_progress(path: Path, said: Any, values: Mapping[str, Any]) -> None:
    """Check that a checkpoint has all required entries, that all are valid, and that the arrays they name exist.

    Args:
        path: the file, for messages.
        said: the progress in the checkpoint's metadata: entry -> value.
        values: the arrays of the checkpoint, by name.

    Raises:
        OnnxgradError: an entry is missing or invalid, or a value that it names is missing. The message names it.
    """
    if not isinstance(said, dict):
        raise _unfit(path, "its progress is not a JSON object")
    for name, form in {**COMMON, **OF_A_RUN, **OPTIONAL}.items():
        if name not in said and name in COMMON:
            raise _unfit(path, f"its entry '{name}' is missing")
        if name in said and not form(said[name]):
            raise _unfit(path, f"its entry '{name}' is invalid: {_short(said[name])}")
    named = [*said["weights"], *said.get("averages", {}).values()]
    gone = next((name for name in named if name not in values), None)
    if gone is not None:
        raise _unfit(path, f"it refers to '{gone}', but does not contain it")


def check_run(path: Path, said: Mapping[str, Any]) -> None:
    """Check that a run can continue from a checkpoint.

    Checkpoints that another program wrote, or that belong to training artifacts, lack entries that are needed.

    Raises:
        OnnxgradError: an entry in `OF_A_RUN` is missing.
    """
    lacking = next((name for name in OF_A_RUN if name not in said), None)
    if lacking is not None:
        hint = "`onnxgrad train` writes them; leave `resume` out, and name another folder with `run`"
        raise unreadable(f"'{path}' is not a checkpoint of a run: its entry '{lacking}' is missing", hint)


def is_log_line(value: Any) -> bool:
    """Return True if a decoded line of a log is valid: it has a step, and losses are numbers, or null if undefined."""
    if not isinstance(value, dict) or not _count(value.get("step")):
        return False
    if any(isinstance(each, int) and not isinstance(each, bool) and not _float(each) for each in value.values()):
        return False
    losses = [value[name] for name in ("loss", "val_loss") if name in value]
    return ("rate" not in value or "loss" in value) and all(x is None or _float(x) for x in losses)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _unfit(path: Path, why: str) -> OnnxgradError:
    return unreadable(f"'{path}' is not a valid checkpoint: {why}", "use another copy, or an earlier checkpoint")


def check_ema(ema: Mapping[str, str], values: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Check that moving averages (EMA) can replace the weights.

    Args:
        ema: weight -> the name of the state with its moving average.
        values: weights and state, by name.

    Returns:
        A copy of `ema`.

    Raises:
        UsageError: there are no averages, a weight or an average is missing, or an average has a different dtype than
            its weight.
    """
    if not ema:
        hint = "train with `ema=DECAY`, such as 0.999"
        raise conflict("`use_ema`: there are no moving averages of the weights", hint)
    for name, average in ema.items():
        if name not in values or average not in values:
            raise unknown_name(f"`use_ema`: there is no '{name}' with an average '{average}'", "leave `use_ema` out")
        if values[name].dtype != values[average].dtype:
            message = f"`use_ema`: '{name}' is {values[name].dtype}, but its average {values[average].dtype}"
            raise wrong_type(message, "leave `use_ema` out")
    return dict(ema)
