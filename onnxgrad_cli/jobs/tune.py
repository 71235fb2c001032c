"""Find the fastest implementation of each gradient on this machine, by timing them at the shapes of a model.

Some gradients can be computed by several equivalent groups of nodes, called forms.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from onnx import ModelProto, helper, numpy_helper

from onnxgrad_cli.autodiff.kernel_variants import TABLE, VariantChoice, load_tuned
from onnxgrad_cli.builder import TrainingModel
from onnxgrad_cli.common import checks, strict_json
from onnxgrad_cli.common.flags import job
from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.compat.random_feeds import random_feed
from onnxgrad_cli.derivatives.kinds import derive
from onnxgrad_cli.errors import OnnxgradError, conflict
from onnxgrad_cli.execution.attribute_failures import attribute_failures
from onnxgrad_cli.execution.interleaved_timing import interleaved
from onnxgrad_cli.execution.session import load_onnxruntime, open_session
from onnxgrad_cli.files import STREAM, ModelSource, check_target, own_model, save_bytes
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node, messages
from onnxgrad_cli.ir.types import shape_of
from onnxgrad_cli.ir.weightless_copy import copied
from onnxgrad_cli.jobs.output_plan import file_of
from onnxgrad_cli.options import Options
from onnxgrad_cli.targets import STANDARD

GAIN = 0.95
"""A form is chosen if its time is below this fraction of the default form's. Smaller gains may be measurement noise."""

MAX_RELATIVE_DIFFERENCE = 1e-3
"""Largest allowed difference between two forms, as a fraction of the gradient's largest element.

Forms round differently.
"""

LEADING, OTHER = 8, 64
"""Default sizes of symbolic dimensions in measurements: on the first axis of an input, and on other axes."""


@dataclass(frozen=True)
class Measured:
    """The measured times of a gradient that has several forms.

    Attributes:
        place: a text with the operator, gradient, shapes and attributes; see `kernel_variants.key`.
        milliseconds: form -> its time, including the time of the forward node and of its other gradients.
        default: the form that a build uses by default for these shapes.
        best: the fastest form, or the default form if no other is clearly faster.
    """

    place: str
    milliseconds: Mapping[str, float]
    default: str
    best: str


@attribute_failures
@job
def run_tune(
    model: ModelSource,
    out: str | Path | None = None,
    options: Options | None = None,
    *,
    sizes: Mapping[str, int] | None = None,
    threads: int | None = None,
    repeat: int = 7,
    tell: Tell = silent,
) -> tuple[list[Measured], Path]:
    """Time the forms of each gradient of a model, and write a file with the forms that are faster than the default.

    Args:
        model: the inference model.
        out: the file for the chosen forms; by default `<model>.tuned.toml`.
        options: the options of the training model.
        sizes: symbol -> its size in the measurements.
        threads: the number of threads; None is onnxruntime's choice.
        repeat: the number of rounds of measurements. In each round, all forms are timed in turn.
        tell: receives progress messages.

    Returns:
        The measurements, and the file.

    Raises:
        UsageError: a file that does not contain chosen forms would be replaced, or the number of threads is too large.
        UnsupportedError: the model can't be differentiated.
        OnnxgradError: the model can't be read, a file can't be written, or two forms compute different gradients.
    """
    if threads is not None:
        checks.threads(threads)
    options = replace(options or Options(), tuned={})
    if options.target != STANDARD:
        raise conflict(
            f"tuning measures standard operators only, but `target={options.target!r}` also uses other operators",
            "leave `target` out",
        )
    target = _target(model, out)
    proto, path = own_model(model)
    open_ = _differentiated(proto, path, options)
    bound = {**_guess(open_), **(sizes or {})}
    fixed = _differentiated(proto, path, _bind(options, open_, bound)) if bound else open_
    if bound:
        tell(f"measured with {', '.join(f'{name} = {size}' for name, size in bound.items())}", 0)
    concrete = {_site(choice): choice for choice in fixed.training.kernel_variants.choices.values()}
    found = []
    for place, choice in open_.training.kernel_variants.choices.items():
        here = concrete.get(_site(choice))
        if here is None or len(choice.forms) < 2:
            continue
        if not _is_sized(here):
            tell(f"{place} is skipped, because the sizes of its inputs are only known in a run", 0)
            continue
        tell(place, 1)
        times = interleaved(_steps(here, threads), repeat)
        best = min(times, key=times.__getitem__)
        default = choice.default
        best = best if times[best] < GAIN * times.get(default, np.inf) else default
        found.append(Measured(place, times, default, best))
    save_bytes(_toml(found, threads).encode(), target)
    return found, target


def _target(model: ModelSource, out: str | Path | None) -> Path:
    """Return the path of the file for the chosen forms.

    Raises:
        UsageError: the model is stdin; the file is stdout or an input; or an existing file has other
            content.
        OnnxgradError: the file can't be written.
    """
    if model == STREAM:
        raise conflict("tuning can't read a model from stdin", "pass the model as a file")
    target = file_of(model, out, "tuned", ".toml")
    check_target(target, force=True)
    if target.exists():
        load_tuned(target)
    return target


def _differentiated(model: ModelProto, path: Path | None, options: Options) -> TrainingModel:
    copy = copied(model)
    built = TrainingModel(Graph(copy, path), options)
    built.run(stop_after="backward")
    return built


def _guess(built: TrainingModel) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for name in built.training.inputs:
        for axis, size in enumerate(shape_of(built.graph.types.get(name)) or ()):
            if isinstance(size, str):
                sizes.setdefault(size, OTHER if axis else LEADING)
    return sizes


def _bind(options: Options, built: TrainingModel, bound: Mapping[str, int]) -> Options:
    """Return the options with the shape of each input, in which `bound` replaces symbolic sizes.

    `shapes` is set instead of `dims`, because `dims` can't set the size of an unnamed dimension.
    """
    known = {name: shape_of(built.graph.types.get(name)) for name in built.training.inputs}
    shapes = {name: tuple(bound.get(str(n), n) for n in shape) for name, shape in known.items() if shape is not None}
    return replace(options, shapes={**options.shapes, **shapes})


def _site(choice: VariantChoice) -> tuple[str, str]:
    return choice.node.output[0], choice.name


def _is_sized(choice: VariantChoice) -> bool:
    """Return True if the sizes of all inputs of a node are known. With random sizes, a node might be invalid."""
    shapes = (shape_of(choice.graph.types.get(name)) for name in choice.node.input if name)
    return all(shape is not None and all(isinstance(size, int) for size in shape) for shape in shapes)


def _steps(choice: VariantChoice, threads: int | None) -> dict[str, Callable[[], object]]:
    """Return a map: form -> a function that runs the node and its gradients with this form.

    Raises:
        OnnxgradError: two forms give different gradients.
    """
    alone, outputs = _alone(choice.graph, choice.node), {}
    steps: dict[str, Callable[[], object]] = {}
    feeds: dict[str, np.ndarray] = {}
    for form in choice.forms:
        tuned = Options(tuned={choice.name: form})
        gradient = derive(alone, wrt=choice.wanted, options=tuned)
        feeds = feeds or {name: _small(x) for name, x in random_feed(gradient, seed=0).items()}
        session = open_session(gradient, threads=threads)
        steps[form] = partial(session.run, None, feeds)
        outputs[form] = session.run(None, feeds)
    for form, arrays in outputs.items():
        for one, other in zip(arrays, outputs[choice.default], strict=True):
            if np.abs(one - other).max(initial=0) > MAX_RELATIVE_DIFFERENCE * np.abs(other).max(initial=1e-30):
                raise OnnxgradError(
                    f"two implementations of '{choice.name}', '{form}' and '{choice.default}', give different "
                    f"gradients at node '{choice.node.name}'",
                    "this is a bug in onnxgrad: please report it with the model",
                )
    return steps


def _small(x: np.ndarray) -> np.ndarray:
    """Multiply random floats by 0.1.

    With weights around 1, gradients of long recurrent layers would be mostly rounding.
    """
    return x * x.dtype.type(0.1) if x.dtype.kind == "f" else x


def _alone(graph: Graph, node: Node) -> ModelProto:
    """Return a model with a single node.

    Constants of fewer than two axes stay constants; other operands become inputs.
    """
    names = [name for name in dict.fromkeys(node.input) if name]
    constants = {name: array for name in names if (array := graph.constant(name)) is not None and array.ndim < 2}
    types = {name: graph.types[name] for name in (*names, *node.output) if name}
    inputs = [helper.make_value_info(name, types[name]) for name in names if name not in constants]
    outputs = [helper.make_value_info(name, types[name]) for name in node.output if name]
    stored = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    body = helper.make_graph(messages([node]), "alone", inputs, outputs, stored)
    return helper.make_model(body, opset_imports=graph.proto.opset_import, ir_version=graph.proto.ir_version)


def _toml(found: list[Measured], threads: int | None) -> str:
    made_on = f"{platform.processor() or platform.machine()}, {threads or os.cpu_count()} threads"
    lines = [f"# onnxgrad tune: onnxruntime {load_onnxruntime().__version__}, {made_on}", f"[{TABLE}]"]
    for each in found:
        if each.best != each.default:
            ratio = each.milliseconds[each.best] / each.milliseconds[each.default]
            choice = f"{strict_json.dumps(each.place)} = {strict_json.dumps(each.best)}"
            lines.append(f"{choice}  # {ratio:.2f} of {each.default}'s time")
    return "\n".join(lines) + "\n"
