"""Convert the settings of a run to text.

A checkpoint stores the texts. If a run is resumed with other settings, the error lists the differences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from onnxgrad_cli.common.packages import tool_version
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.options import Options
from onnxgrad_cli.options.train import DEFAULT_OPTIMIZER, Course

CHANGEABLE = frozenset(
    "epochs max_steps learning_rate schedule patience eval_every save_every provider threads".split()
)
"""Settings that may change when a run is resumed, and are therefore not stored."""


def settings_of(options: Options, course: Course, **others: object) -> dict[str, str]:
    """Return a map: name of a setting that a resumed run must keep -> its value as text.

    The map includes onnxgrad's version.

    Args:
        options: options of the build.
        course: options of the training.
        others: further arguments of the run.
    """
    options = replace(options, optimizer=options.optimizer or DEFAULT_OPTIMIZER)
    parts = (options, course, course.sequences, course.samples)
    values = {field.name: getattr(part, field.name) for part in parts for field in fields(part)} | others
    for name in ("loss_options", "optimizer_options"):
        values[name] = {_hyphenated(setting): value for setting, value in values[name].items()}
    for name in ("sequences", "samples", *CHANGEABLE):
        values.pop(name, None)
    return {"onnxgrad": tool_version(), **{name: as_text(value) for name, value in sorted(values.items())}}


def _hyphenated(setting: str) -> str:
    """Replace underscores by hyphens in the name of a setting. Keep the name of an output or label before a colon."""
    owner, colon, name = setting.rpartition(":")
    return owner + colon + name.replace("_", "-")


def as_text(value: Any) -> str:
    """Return the value of a setting as a user would type it, or "" if it is not set."""
    if value is None or (not isinstance(value, (bool, int, float)) and not value):
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={as_text(each)}" for key, each in value.items())
    if isinstance(value, LossSpec):
        share = "" if value.weight == 1 and not value.schedule else f"{value.weight:g}"
        share += f"@{value.schedule}" * bool(value.schedule)
        words = (value.name, value.output or "", value.label or "", share)
        return f"{value.data}=" * bool(value.data) + ":".join(words).rstrip(":")
    if isinstance(value, (tuple, list)):
        return ", ".join(map(as_text, value))
    return str(getattr(value, "__name__", value))
