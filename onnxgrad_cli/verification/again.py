"""Differentiate an original again, for the same outputs and variables as a model of derivatives that is checked."""

from __future__ import annotations

import glob
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from onnx import ModelProto

from onnxgrad_cli.common.choices import Derivative, Mode
from onnxgrad_cli.derivatives.kinds import derive
from onnxgrad_cli.ir.types import Arrays
from onnxgrad_cli.metadata import Derived, read_derived
from onnxgrad_cli.options import Options


def derive_again(
    derived: Derived, original: ModelProto, path: Path | None, kind: str, moves: Mapping[str, str], **options: Any
) -> tuple[ModelProto, Derived]:
    """Return another model of derivatives, and its description.

    Args:
        derived: the description of the checked derivatives.
        original: the model to differentiate; external data are relative to `path`.
        path: the file it was read from.
        kind: the kind of the other derivatives.
        moves: variable of the checked derivatives -> the variable to use instead.
        options: more options of `derive`.
    """
    of, wrt = (map(glob.escape, names) for names in (derived.of, (moves.get(x, x) for x in derived.wrt)))
    options = {"class_": derived.pick or None, **options}
    model = derive(
        original, cast(Derivative, kind), of=list(of), wrt=list(wrt), class_axis=derived.class_axis, path=path,
        options=Options(mode=cast(Mode, derived.mode)), **options,
    )  # fmt: skip
    said = read_derived(model)
    assert said is not None
    return model, said


def feeds_again(said: Derived, derived: Derived, feeds: Arrays) -> Arrays:
    """Return feeds in which weights of outputs and labels also have the names that another description gives them."""
    names = [*zip(said.weights, derived.weights, strict=False), (said.label, derived.label)]
    return {**feeds, **{theirs: feeds[ours] for theirs, ours in names if ours}}
