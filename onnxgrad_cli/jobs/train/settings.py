"""Write the settings of a run as text. A checkpoint stores them, so that a refused resume lists the changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from onnxgrad_cli.jobs.train.course import Course
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.metadata import tool_version
from onnxgrad_cli.options import Options

CHANGEABLE = frozenset(
    "epochs max_steps learning_rate schedule patience eval_every save_every provider threads".split()
)
"""Settings with which a run may continue although it began with other ones."""


def settings_of(options: Options, course: Course, **others: object) -> dict[str, str]:
    """Return the settings that a run must keep, by the names of the arguments, and the version of onnxgrad.

    Args:
        options: options of the build.
        course: options of the training.
        others: further arguments of the run.
    """
    options = replace(options, optimizer=options.optimizer or "adam")
    parts = (options, course, course.sequences, course.samples)
    values = {field.name: getattr(part, field.name) for part in parts for field in fields(part)} | others
    for name in ("loss_options", "optimizer_options"):
        values[name] = {_hyphenated(setting): value for setting, value in values[name].items()}
    for name in ("sequences", "samples", *CHANGEABLE):
        values.pop(name, None)
    return {"onnxgrad": tool_version(), **{name: as_text(value) for name, value in sorted(values.items())}}


def _hyphenated(setting: str) -> str:
    """Return a setting with hyphens. The name of an output or label before a colon stays."""
    owner, colon, name = setting.rpartition(":")
    return owner + colon + name.replace("_", "-")


def as_text(value: Any) -> str:
    """Return the value of a setting as it would be typed; "" if it is not set."""
    if value is None or (not isinstance(value, (bool, int, float)) and not value):
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={as_text(each)}" for key, each in value.items())
    if isinstance(value, LossSpec):
        words = (value.name, value.output or "", value.label or "", "" if value.weight == 1 else f"{value.weight:g}")
        return ":".join(words).rstrip(":")
    if isinstance(value, (tuple, list)):
        return ", ".join(map(as_text, value))
    return str(getattr(value, "__name__", value))
