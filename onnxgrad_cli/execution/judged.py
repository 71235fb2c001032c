"""Whose fault it is where something is raised that nobody expected: the model's, if others have something against it.

A file can be wrong in more ways than can be guarded against one by one, and whoever meets one raises whatever Python
raises then. So the model is read again and given to those who share no code with onnxgrad: onnx's checker, its strict
inference of types, and onnxruntime, which loads it and runs it on drawn data. What they say is the error; where they
say nothing, the fault is told as ours. All that is run for a job, and for this, has the limits of one (`limits`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import ParamSpec, TypeVar

from onnx import ModelProto

from onnxgrad_cli.common.inputs import inputs_kept
from onnxgrad_cli.errors import InternalError, OnnxgradError
from onnxgrad_cli.execution.limits import OverLimit, one_patience, unasked
from onnxgrad_cli.execution.observation import Probe, fed_shapes, is_quick
from onnxgrad_cli.execution.session import start_session
from onnxgrad_cli.execution.sizes import sized, sizes_to_try
from onnxgrad_cli.files import ModelSource, is_read_once, load_external_data, own_model
from onnxgrad_cli.files.reading import not_text
from onnxgrad_cli.ir.dialects import complaint, mend
from onnxgrad_cli.ir.skeleton import skeleton
from onnxgrad_cli.ir.types import is_external, shape_of

SIZES_TRIED = 24
"""Sizes of its inputs at which a model must fail, to be at fault."""

LARGEST, PRIMES = 2**24, (101, 103, 107, 109, 113, 127, 131, 137)
"""The largest size of an input that is run, and the sizes that stand for larger ones."""

P = ParamSpec("P")
R = TypeVar("R")

LIMITS_OF_ONNXRUNTIME = ("Current official support", "is not a registered", "not supported", "implementation for")
"""What onnxruntime says where it is not the model that is at fault, but itself that lacks something."""


def judged(job: Callable[P, R]) -> Callable[P, R]:
    """Let a job, whose first argument is a model, tell what it did not expect as the model's fault where it is that.

    What it reads it does not write (`common.inputs`).
    """

    @functools.wraps(job)
    def run(*args: P.args, **keywords: P.kwargs) -> R:
        with one_patience(), inputs_kept():
            try:
                return job(*args, **keywords)
            except (OnnxgradError, MemoryError, OSError) as error:
                if not isinstance(error, InternalError):
                    raise
                failure: Exception = error
            except Exception as error:
                failure = error
            given = inspect.signature(job).bind(*args, **keywords).arguments
            source = next(iter(given.values()))
            if is_read_once(source):
                raise failure
            with unasked():
                fault, hint = _fault(source, given.get("path"))
        if not fault:
            raise failure
        raise OnnxgradError(fault, hint) from failure

    return run


def _fault(source: ModelSource, path: Path | None) -> tuple[str, str]:
    """What others have against a model, "" for nothing, and what to do about it."""
    model, path = own_model(source, path)
    fault = not_text(model)
    if not fault:
        bare = skeleton(model)
        mend(bare)
        fault = complaint(bare, full=True) or _refusal(model, path)
    if fault:
        return f"the model is no valid ONNX model: {fault}", "export it again"
    free = {d for value in model.graph.input for d in shape_of(value.type) or () if isinstance(d, str) and d != "?"}
    hint = f"export it again, or fix sizes that it takes for free by mistake with `dims`: {', '.join(sorted(free))}"
    _shrink(model)
    return _stumble(model, path), hint if free else "export it again"


def _refusal(model: ModelProto, path: Path | None) -> str:
    """Why onnxruntime does not load a model, where that is due to the model."""
    if any(map(is_external, model.graph.initializer)):
        load_external_data(model, path)
    try:
        start_session(model, path)
    except Exception as error:  # onnxruntime's exceptions share no base class
        text = " ".join(str(error).split())
        return "" if any(limit in text for limit in LIMITS_OF_ONNXRUNTIME) else text[:600]
    return ""


def _shrink(model: ModelProto) -> None:
    """Replace sizes of inputs that are too large to be run by small primes.

    Equal sizes stay equal, and different sizes stay different.
    """
    dims = [dim for value in model.graph.input for dim in value.type.tensor_type.shape.dim]
    large = dict.fromkeys(dim.dim_value for dim in dims if dim.dim_value > LARGEST)
    smaller = dict(zip(large, PRIMES, strict=False))
    for dim in dims:
        if dim.dim_value in smaller:
            dim.dim_value = smaller[dim.dim_value]


def _stumble(model: ModelProto, path: Path | None) -> str:
    """Why a model that can be fed runs on no data that are drawn; "" where it runs, or is too large for that."""
    shapes = fed_shapes(model)
    if shapes is None or not is_quick(model):
        return ""
    try:
        probe, why = Probe(model, [value.name for value in model.graph.output], path), ""
    except Exception:  # onnxruntime lacks a kernel: `_refusal` has seen that it is not the model's fault
        return ""
    for sizes in islice(sizes_to_try(shapes, model), SIZES_TRIED):
        try:
            probe(sized(shapes, sizes))
        except OverLimit:
            return ""
        except Exception as error:  # onnxruntime's exceptions share no base class
            why = f"the model runs on no data that are drawn for it: {' '.join(str(error).split())[:600]}"
        else:
            return ""
    return why
