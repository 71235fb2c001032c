"""Which form of a gradient is the fastest on this machine: all are measured at the shapes of a model, node by node."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from onnx import ModelProto, helper, numpy_helper

from onnxgrad_cli.autodiff.kernel_variants import TABLE, VariantChoice, load_tuned
from onnxgrad_cli.builder import TrainingModel
from onnxgrad_cli.common import checks, strict_json
from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.compat.random_feed import random_feed
from onnxgrad_cli.derivatives.kinds import derive
from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.execution.interleaved_timing import interleaved
from onnxgrad_cli.execution.judged import judged
from onnxgrad_cli.execution.session import load_onnxruntime, open_session
from onnxgrad_cli.files import STREAM, ModelSource, check_target, own_model, save_bytes
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node, messages
from onnxgrad_cli.ir.skeleton import copied
from onnxgrad_cli.ir.types import shape_of
from onnxgrad_cli.jobs.targets import target_of
from onnxgrad_cli.options import Options
from onnxgrad_cli.targets import STANDARD

if TYPE_CHECKING:
    import onnxruntime

GAIN = 0.95
"""What a form must take of the default's time to be chosen: less is within the noise of a shared machine."""

SAME = 1e-3
"""How far two forms may be apart, relative to the largest number of the gradient: both are float32 sums."""

LEADING, OTHER = 8, 64
"""The sizes of symbols that lead an input, and of others, that are measured at where none is given."""


@dataclass(frozen=True)
class Measured:
    """A gradient that has several forms.

    Attributes:
        place: operator, gradient, shapes and attributes; see `kernel_variants.key`.
        milliseconds: of each form, the node itself and its other gradients included.
        default: the form that follows from the shapes.
        best: the fastest, or the default where none is clearly faster.
    """

    place: str
    milliseconds: Mapping[str, float]
    default: str
    best: str


@judged
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
    """Measure the forms of all gradients of a model that have several, and write the choices that are faster.

    Args:
        model: the inference model.
        out: the choices; by default `<model>.tuned.toml`.
        options: what is built of it.
        sizes: symbol -> the size that it is measured at.
        threads: how many the processor uses; None is onnxruntime's choice.
        repeat: rounds of interleaved measurements.
        tell: takes what is narrated.

    Returns:
        What was measured, and the file.

    Raises:
        UsageError: a file would be replaced that holds no choices, or so many threads make no sense.
        UnsupportedError: the model can't be differentiated.
        OnnxgradError: the model can't be read, a file can't be written, or two forms compute different gradients.
    """
    if threads is not None:
        checks.threads(threads)
    options = replace(options or Options(), tuned={})
    if options.target != STANDARD:
        raise UsageError(
            f"tuning measures standard operators, and `target={options.target!r}` has forms of its own",
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
            tell(f"{place} is left out: the sizes of what it reads are known only in a run", 0)
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
    """The file that the choices go to.

    Raises:
        UsageError: the model or the choices would go through a pipe, or the file is an input, or holds no choices.
        OnnxgradError: it can't be written.
    """
    if model == STREAM or str(out) == STREAM:
        raise UsageError("tuning reads its model from a file and writes to one", "name both")
    target = target_of(model, out, "tuned", ".toml", streams=False)
    assert target is not None, "stdin is refused above"
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
    """With whole shapes, for a dimension without a name can't be bound by one."""
    known = {name: shape_of(built.graph.types.get(name)) for name in built.training.inputs}
    shapes = {name: tuple(bound.get(str(n), n) for n in shape) for name, shape in known.items() if shape is not None}
    return replace(options, shapes={**options.shapes, **shapes})


def _site(choice: VariantChoice) -> tuple[str, str]:
    return choice.node.output[0], choice.name


def _is_sized(choice: VariantChoice) -> bool:
    """Whether all sizes of what a node reads are known; drawn ones would say nothing, and a window might not fit."""
    shapes = (shape_of(choice.graph.types.get(name)) for name in choice.node.input if name)
    return all(shape is not None and all(isinstance(size, int) for size in shape) for shape in shapes)


def _steps(choice: VariantChoice, threads: int | None) -> dict[str, Callable[[], object]]:
    """A run of the node's gradients in each form.

    Raises:
        OnnxgradError: two forms give different gradients.
    """
    alone, steps, outputs = _alone(choice.graph, choice.node), {}, {}
    feeds: dict[str, np.ndarray] = {}
    for form in choice.forms:
        tuned = Options(tuned={choice.name: form})
        gradient = derive(alone, wrt=choice.wanted, options=tuned)
        feeds = feeds or {name: _small(x) for name, x in random_feed(gradient, seed=0).items()}
        session = open_session(gradient, threads=threads)
        steps[form] = _bound(session, feeds)
        outputs[form] = session.run(None, feeds)
    for form, arrays in outputs.items():
        for one, other in zip(arrays, outputs[choice.default], strict=True):
            if np.abs(one - other).max(initial=0) > SAME * np.abs(other).max(initial=1e-30):
                raise OnnxgradError(
                    f"the forms '{form}' and '{choice.default}' of {choice.name} differ at '{choice.node.name}'",
                    "this is an error in onnxgrad: please report it with the model",
                )
    return steps


def _small(x: np.ndarray) -> np.ndarray:
    """A tenth of random floats: with weights around 1 the gradient of a long recurrent layer is rounding alone."""
    return x * x.dtype.type(0.1) if x.dtype.kind == "f" else x


def _bound(session: onnxruntime.InferenceSession, feeds: Mapping[str, np.ndarray]) -> Callable[[], object]:
    return lambda: session.run(None, feeds)


def _alone(graph: Graph, node: Node) -> ModelProto:
    """A model of one node; constants stay constants."""
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
