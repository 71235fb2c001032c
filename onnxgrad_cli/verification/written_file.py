"""Check that onnxruntime opens a written file, and that the file gives the same results as the proved model.

A proof runs the model in memory, but the user gets the file. The two can differ, because of external data, names that
must be unique in the whole file, or training information beside the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from onnx import ModelProto, numpy_helper

from onnxgrad_cli.errors import CheckFailed
from onnxgrad_cli.execution.limits import OverLimit, run_limited
from onnxgrad_cli.execution.session import OPTIMIZED_FOR_FEW_RUNS, array_run, load_onnxruntime, start_session
from onnxgrad_cli.files import load_model
from onnxgrad_cli.ir.types import Arrays
from onnxgrad_cli.verification.gradients.judgement import off

MAX_RELATIVE_DIFFERENCE = 1e-4
"""Largest accepted difference between the results of two sessions, relative to the largest entry of each result."""


@dataclass(frozen=True)
class Ran:
    """A model with its weights in memory, the feeds of a run, and its outputs."""

    model: ModelProto
    feeds: Arrays
    outputs: Arrays


def refused(model: ModelProto, path: Path | None, file: Path | None = None) -> str:
    """Return the reason why onnxruntime does not open a model or its file; "" if it does.

    Args:
        model: the model.
        path: the file it was read from; external data are relative to it.
        file: a file it was written to, which is opened instead of the model in memory.
    """
    try:
        start_session(model, path, optimized=0, file=file)
    except Exception as error:  # onnxruntime's exceptions share no base class
        return _told(error, file)
    return ""


def _told(error: Exception, file: Path | None) -> str:
    """Return the text of an error of onnxruntime, with the name of the temporary file replaced by 'the file'."""
    text = str(error).strip() or type(error).__name__
    return text.replace(str(file), "the file").replace(file.name, "the file") if file else text


def check_opens(
    model: ModelProto, original: ModelProto, path: Path | None, name: str = "the model to write"
) -> Callable[[Path], None]:
    """Return a function for `save_model` that raises CheckFailed if onnxruntime does not open the written file.

    The function passes if onnxruntime does not open the original either, for example because both use operators of
    another library: the model is then meant for another runtime.

    Args:
        model: the model that is written.
        original: the model that `model` was made from.
        path: the file that the original was read from.
        name: the name of the file in error messages.
    """

    def check(file: Path) -> None:
        why = refused(model, None, file)
        if why and not refused(original, path):
            raise CheckFailed(f"onnxruntime does not load {name}: {why}", "nothing was written")

    return check


def difference(file: Path, written: ModelProto, ran: Ran, step: Callable[[ModelProto], ModelProto] | None) -> str:
    """Return a description of how a written model differs from the one that the proof ran, or "" if it doesn't.

    A model that draws random numbers gives other results in each run. It is only checked that such a model opens and
    runs.

    Args:
        file: the file.
        written: the model that was written to it.
        ran: the run of the model that was proved.
        step: converts the model in the file to the form that was proved; None if they are the same.
    """
    why = refused(written, None, file) if step else ""
    if why:
        return why
    try:
        model = step(load_model(file)[0]) if step else written
        held = step is not None
        got = _results(model, ran, file, in_memory=held, optimized=OPTIMIZED_FOR_FEW_RUNS)  # as in the proof
        if _agree(got, ran.outputs) or _agree(got, _results(ran.model, ran)):  # the second is not optimized
            return ""
        got = _results(model, ran, file, in_memory=held, threads=1)  # one thread sums in one order
        again = [_results(ran.model, ran, threads=1) for _ in range(2)]
    except OverLimit:  # the file opens, but its run takes longer than the default limit
        return ""
    except Exception as error:  # onnxruntime's exceptions share no base class
        return _told(error, file)
    if _agree(got, again[0]) or not _agree(*again):
        return ""
    return "it does not compute the same as the proved model"


def _results(
    model: ModelProto,
    ran: Ran,
    file: Path | None = None,
    in_memory: bool = True,
    threads: int | None = None,
    optimized: int = 0,
) -> Arrays:
    """Return the outputs of a model, or of the file that it was written to, for the feeds of the run `ran`."""
    session = start_session(model, file, threads=threads, optimized=optimized, file=None if in_memory else file)
    stored = {tensor.name: tensor for tensor in ran.model.graph.initializer}
    needed = [value.name for value in session.get_inputs()]
    known = {*needed, *(value.name for value in session.get_overridable_initializers())}
    feeds = {name: array for name, array in ran.feeds.items() if name in known}
    feeds |= {name: numpy_helper.to_array(stored[name]) for name in needed if name not in feeds}
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, run_limited(array_run(session), feeds, load_onnxruntime().RunOptions), strict=True))


def _agree(got: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> bool:
    arrays = [name for name in got.keys() & expected.keys() if isinstance(got[name], np.ndarray)]
    return all(off(got[name], expected[name]) <= MAX_RELATIVE_DIFFERENCE for name in arrays)
