"""What a checkpoint says besides its arrays, and a log, held against its form before anything believes it.

Checksums tell damage; this tells a file that somebody wrote so: a null for a count, a list for an object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

from onnxgrad_cli.common.checks import is_number
from onnxgrad_cli.common.choices import Scaling
from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.metadata import Adapter, IntegerWeight

Form = Callable[[Any], bool]

MOST_STEPS = 2**53
"""More than any run takes; what counts beyond is damage."""


def _count(value: Any) -> bool:
    return is_number(value, 0, whole=True) and value <= MOST_STEPS


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _names(value: Any) -> bool:
    return isinstance(value, list) and all(map(_text, value))


def _pairs(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_text, value.values()))


def _float(value: Any) -> bool:
    """A number, nan and infinity included: a metric may be undefined. An integer may have too many digits for one."""
    return isinstance(value, float) or is_number(value)


def are_adapters(value: Any) -> bool:
    """Whether a list describes adapters, as checkpoints and files of adapters have it."""
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
    """Whether an object describes what of a model's integers are floats."""
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
    }  # fmt: skip
    return isinstance(value, dict) and _has({"uncounted": 0, **value}, forms) and value["best"] <= len(value["epochs"])


def _place(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(each, bool) or _count(each) for each in value.values())


def _has(value: Any, forms: Mapping[str, Form]) -> bool:
    return isinstance(value, dict) and value.keys() == forms.keys() and all(form(value[n]) for n, form in forms.items())


COMMON: dict[str, Form] = {"steps": _count, "weights": _names, "adapters": are_adapters}
"""What every checkpoint says."""

ANEW = "leave `resume` out and add `force=True`, which replaces the run, or `run=DIR`, which keeps it"
"""What to do where a run can't be continued."""

OF_A_RUN: dict[str, Form] = {
    "batches": _place, "schedule": lambda value: isinstance(value, dict), "run": _run, "watched": _text,
    "model": _text, "data": _pairs,
}  # fmt: skip
"""What the checkpoint of a run says besides, from which it goes on."""

OPTIONAL: dict[str, Form] = {
    "averages": _pairs, "quantized": _quantized, "frozen": _names, "state": _names, "writer": _text, "base": _text,
    "rates": _text, "settings": _pairs, "untrained": _pairs,
}  # fmt: skip


def check_progress(path: Path, said: Any, values: Mapping[str, Any]) -> None:
    """Make sure that a checkpoint says what one says, and speaks of values that it has.

    Raises:
        OnnxgradError: it does not; the message names the entry.
    """
    if not isinstance(said, dict):
        raise _unfit(path, "its progress is no JSON object")
    for name, form in {**COMMON, **OF_A_RUN, **OPTIONAL}.items():
        if name not in said and name in COMMON:
            raise _unfit(path, f"it does not say its {name}")
        if name in said and not form(said[name]):
            raise _unfit(path, f"what it says of its {name} can't be right: {_short(said[name])}")
    named = [*said["weights"], *said.get("averages", {}).values()]
    gone = next((name for name in named if name not in values), None)
    if gone is not None:
        raise _unfit(path, f"it names '{gone}', which it does not hold")


def check_run(path: Path, said: Mapping[str, Any]) -> None:
    """Make sure that a run can go on from a checkpoint: those of other programs and of artifacts are of no run.

    Raises:
        OnnxgradError: it can't.
    """
    lacking = next((name for name in OF_A_RUN if name not in said), None)
    if lacking is not None:
        raise OnnxgradError(
            f"'{path}' is no checkpoint of a run: it does not say its {lacking}",
            "`onnxgrad train` writes them; leave `resume` out, and name another folder with `run`",
        )


def is_nominal(value: Any) -> bool:
    """Whether a nominal checkpoint says of each value its type and its shape."""
    return isinstance(value, dict) and all(
        isinstance(each, list) and len(each) == 2 and _text(each[0]) and isinstance(each[1], list)
        and all(map(_count, each[1])) for each in value.values()
    )  # fmt: skip


def is_log_line(value: Any) -> bool:
    """Whether a line of a log says of which step it is, and its losses as numbers, or as null what is none."""
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
    return OnnxgradError(f"'{path}' is no right checkpoint: {why}", "take another copy, or an earlier checkpoint")
