"""Attribute unexpected exceptions to an invalid model or to a bug in onnxgrad.

A file can be wrong in more ways than can be checked in advance, so any exception may be raised. After an unexpected
exception, the model is read again and given to tools that share no code with onnxgrad: onnx's checker with strict type
inference, and onnxruntime, which loads the model and runs it on random data. If one of these tools reports an error in
the model, that error is raised. Otherwise the exception is reported as a bug in onnxgrad. These checks count toward the
time and memory limits of the whole job.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import ParamSpec, TypeVar

from onnx import ModelProto

from onnxgrad_cli.common.inputs import input_protection
from onnxgrad_cli.errors import InternalError, OnnxgradError
from onnxgrad_cli.execution.limits import OverLimit, shared_budget, within_budget
from onnxgrad_cli.execution.observation import Probe, fed_shapes, is_quick
from onnxgrad_cli.execution.session import start_session
from onnxgrad_cli.execution.sizes_to_try import sized, sizes_to_try
from onnxgrad_cli.files import ModelSource, is_read_once, load_external_data, own_model
from onnxgrad_cli.ir.dialects import checker_error, repair
from onnxgrad_cli.ir.types import is_external, shape_of
from onnxgrad_cli.ir.weightless_copy import skeleton

SIZES_TRIED = 24
"""Largest number of input sizes that are tried. If a model fails at all of them, the model is considered invalid."""

MAX_TRIED_SIZE, PRIMES = 2**24, (101, 103, 107, 109, 113, 127, 131, 137)
"""The largest size of an axis with which a model is run, and the sizes that replace larger ones."""

P = ParamSpec("P")
R = TypeVar("R")

LIMITS_OF_ONNXRUNTIME = ("Current official support", "is not a registered", "not supported", "implementation for")
"""Texts in errors of onnxruntime about features that it lacks. Such an error does not make the model invalid."""


def attribute_failures(job: Callable[P, R]) -> Callable[P, R]:
    """Decorate a job so that its unexpected exceptions are replaced by the error that another tool finds in the model.

    If no tool finds an error, the exception is raised unchanged. The first argument of the job must be a model. While
    the job runs, it can't write to the files that it reads (`common.inputs`).
    """

    @functools.wraps(job)
    def run(*args: P.args, **keywords: P.kwargs) -> R:
        with shared_budget(), input_protection():
            try:
                return job(*args, **keywords)
            except Exception as error:
                expected = isinstance(error, (OnnxgradError, MemoryError, OSError))
                if expected and not isinstance(error, InternalError):
                    raise
                failure = error
            given = inspect.signature(job).bind(*args, **keywords).arguments
            source = next(iter(given.values()))
            if is_read_once(source):
                raise failure
            with within_budget():
                fault, hint = _fault(source, given.get("path"))
        if not fault:
            raise failure
        raise OnnxgradError(fault, hint) from failure

    return run


def _fault(source: ModelSource, path: Path | None) -> tuple[str, str]:
    """Return the error that other tools find in a model, or "", and a hint for the user."""
    model, path = own_model(source, path)
    bare = skeleton(model)
    repair(bare)
    if fault := checker_error(bare, full=True) or _refusal(model, path):
        return f"the model is not a valid ONNX model: {fault}", "export the model again"
    free = {d for value in model.graph.input for d in shape_of(value.type) or () if isinstance(d, str) and d != "?"}
    hint = f"export the model again, or use `dims` to set sizes that are symbolic by mistake: {', '.join(sorted(free))}"
    _shrink(model)
    return _stumble(model, path), hint if free else "export the model again"


def _refusal(model: ModelProto, path: Path | None) -> str:
    """Return the reason why onnxruntime does not load a model, or "" if it loads it or only lacks a feature."""
    if any(map(is_external, model.graph.initializer)):
        load_external_data(model, path)
    try:
        start_session(model, path)
    except Exception as error:  # onnxruntime's exceptions share no base class
        text = " ".join(str(error).split())
        return "" if any(limit in text for limit in LIMITS_OF_ONNXRUNTIME) else text[:600]
    return ""


def _shrink(model: ModelProto) -> None:
    """Replace sizes in input shapes that are too large for a run by small primes.

    Equal sizes stay equal, and different sizes stay different.
    """
    dims = [dim for value in model.graph.input for dim in value.type.tensor_type.shape.dim]
    large = dict.fromkeys(dim.dim_value for dim in dims if dim.dim_value > MAX_TRIED_SIZE)
    smaller = dict(zip(large, PRIMES, strict=False))
    for dim in dims:
        if dim.dim_value in smaller:
            dim.dim_value = smaller[dim.dim_value]


def _stumble(model: ModelProto, path: Path | None) -> str:
    """Return the error of a model that fails on random data of all sizes; "" if it runs or is too large to be run."""
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
            why = f"the model does not run on random data: {' '.join(str(error).split())[:600]}"
        else:
            return ""
    return why
