"""Every field of the options is declared once, and belongs to one part of a build."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from inspect import get_annotations

from onnxgrad_cli import (
    Options,
)
from onnxgrad_cli.options.declare import declared

FIELDS = list(declared(Options))


def test_each_field_is_declared() -> None:
    assert [field.name for field in dataclasses.fields(Options)] == FIELDS
    assert Options() == replace(Options(mode="train"), mode="keep")


def test_each_field_belongs_to_one_part() -> None:
    parts = [part for part in Options.__mro__ if get_annotations(part) and part is not Options]
    fields = [name for part in parts for name in get_annotations(part)]
    assert sorted(fields) == sorted(FIELDS) and len(parts) > 9
    assert all(f"{name}" in (part.__doc__ or "") for part in parts for name in get_annotations(part))
