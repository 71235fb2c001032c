"""What was written, judged as whoever uses it meets it: onnxruntime opens the file, and computes what was proved.

A proof runs the model in memory. The file is what a user has, and what it says may mean something else to its reader:
external data, names that only the whole file has, training information beside the graph.
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
from onnxgrad_cli.verification.judgement import off

SAME = 1e-4
"""How far results of the same model may be apart in two sessions, relative to the largest entry of each."""


@dataclass(frozen=True)
class Ran:
    """A model with its weights in memory, what it was run on, and what came of it."""

    model: ModelProto
    feeds: Arrays
    outputs: Arrays


def refused(model: ModelProto, path: Path | None, file: Path | None = None) -> str:
    """Why onnxruntime does not open a model, or the file it was written to; "" where it does.

    Args:
        model: the model.
        path: where it was read from; external data are relative to it.
        file: a file it was written to, which is opened in its place.
    """
    try:
        start_session(model, path, optimized=0, file=file)
    except Exception as error:  # of many kinds, none of them public
        return _told(error, file)
    return ""


def _told(error: Exception, file: Path | None) -> str:
    """An error of onnxruntime, without a name that the file has only for a while."""
    text = str(error).strip() or type(error).__name__
    return text.replace(str(file), "the file").replace(file.name, "the file") if file else text


def check_opens(
    model: ModelProto, original: ModelProto, path: Path | None, name: str = "what would be written"
) -> Callable[[Path], None]:
    """A check for `save_model`: onnxruntime opens the file, if it opens the model that it was made from.

    What it has no kernels for in the original either, such as operators of another library, is for a runtime elsewhere.

    Args:
        model: what is written.
        original: the model it was made from.
        path: where that was read from.
        name: what the file is called in an error.
    """

    def check(file: Path) -> None:
        why = refused(model, None, file)
        if why and not refused(original, path):
            raise CheckFailed(f"onnxruntime does not open {name}: {why}", "nothing was written")

    return check


def difference(file: Path, written: ModelProto, ran: Ran, step: Callable[[ModelProto], ModelProto] | None) -> str:
    """What tells a written model from the one that was run; "" where nothing does.

    A model that draws random numbers computes other numbers each time: of it only that it opens and runs is seen.

    Args:
        file: the file.
        written: the model that was written to it.
        ran: the run of what was proved.
        step: what makes of the model in the file the one that was proved; None: they are the same.
    """
    why = refused(written, None, file) if step else ""
    if why:
        return why
    try:
        model = step(load_model(file)[0]) if step else written
        held = step is not None
        got = _results(model, ran, file, in_memory=held, optimized=OPTIMIZED_FOR_FEW_RUNS)  # as what was proved
        if _agree(got, ran.outputs):
            return ""
        if _agree(got, _results(ran.model, ran)):  # opened as the file is, not optimized
            return ""
        got = _results(model, ran, file, in_memory=held, threads=1)  # which sums in one order
        again = [_results(ran.model, ran, threads=1) for _ in range(2)]
    except OverLimit:  # the file opens, and what it computes takes longer than a run may that nobody has asked for
        return ""
    except Exception as error:  # of many kinds, none of them public
        return _told(error, file)
    if _agree(got, again[0]) or not _agree(*again):
        return ""
    return "it does not compute what was proved"


def _results(
    model: ModelProto,
    ran: Ran,
    file: Path | None = None,
    in_memory: bool = True,
    threads: int | None = None,
    optimized: int = 0,
) -> Arrays:
    """What a model, or the file it was written to, makes of the feeds of a run."""
    session = start_session(model, file, threads=threads, optimized=optimized, file=None if in_memory else file)
    stored = {tensor.name: tensor for tensor in ran.model.graph.initializer}
    needed = [value.name for value in session.get_inputs()]
    known = {*needed, *(value.name for value in session.get_overridable_initializers())}
    feeds = {name: array for name, array in ran.feeds.items() if name in known}
    for name in needed:
        if name not in feeds:
            feeds[name] = numpy_helper.to_array(stored[name])
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, run_limited(array_run(session), feeds, load_onnxruntime().RunOptions), strict=True))


def _agree(got: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> bool:
    arrays = [name for name in got.keys() & expected.keys() if isinstance(got[name], np.ndarray)]
    return all(off(got[name], expected[name]) <= SAME for name in arrays)
