"""Whether a training model still computes what the model computes that it was made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from onnx import ModelProto, helper

from onnxgrad_cli.execution.double import DoubleExecutor
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.ir.skeleton import copied
from onnxgrad_cli.ir.types import Arrays
from onnxgrad_cli.verification.case import NOTHING, Case, Found
from onnxgrad_cli.verification.feeds import part
from onnxgrad_cli.verification.judgement import off
from onnxgrad_cli.verification.original import Original

SINGLE, HALF, DOUBLE = 1e-4, 2e-2, 1e-6
"""How far the forward parts may be apart in float32, with narrower floats or integers, and in float64, relative to the
largest entry of an output."""

AMPLIFIED = 1e-2
"""The relative change of an output, by a change in the last digits of the data, from which nothing can be compared."""

ROUNDING = frozenset({"DynamicQuantizeLSTM", "QMoE"})
"""Operators whose kernels round unasked what they multiply with quantized weights, QMoE's of 8 bits in blocks."""


def computes_the_original(case: Case) -> Found:
    """Whether the outputs that the original has too are those that the original computes."""
    original = case.original
    if original is None:
        return NOTHING
    chunks = {term.output: term.chunks for term in case.roles.losses if term.chunks}
    forward = _forward(case.described.model, original.model, chunks)
    if forward is None:
        return Found("skipped", "the loss judges a value that is no output of the original")
    try:  # the training model may run where its original does not
        expected = original(case.feeds)
    except Exception as error:  # the executors' exceptions share no base class
        return Found("skipped", f"the original does not run: {str(error).strip()[:500]}")
    inputs = {name: x for name, x in case.feeds.items() if name in case.roles.fed}  # and the weights as stored
    got = _joined(Executor(forward, fallback=False, threads=None)(inputs), chunks, expected)
    names = [name for name in got if isinstance(got[name], np.ndarray)]
    worst = _largest_difference(got, expected, names)
    allowed = _allowed(got, names, original)
    if worst > allowed:  # by the arithmetic of these data itself?
        noise = _largest_difference(original.noise(case.feeds, case.roles.gradients, case.rng), expected, names)
        allowed += 10 * noise
        if noise > AMPLIFIED and worst <= allowed and not chunks:
            return _compared_in_double(original, forward, names, case, noise)
    status = "passed" if worst <= allowed else "failed"
    return Found(status, f"largest relative difference {worst:.1e} ({original.executor.name})")


def _forward(model: ModelProto, original: ModelProto, chunks: Mapping[str, Sequence[str]]) -> ModelProto | None:
    """The part of a training model that computes the outputs of its original, or chunks; None where it has none."""
    made = {name for node in model.graph.node for name in node.output}
    made.update(value.name for value in model.graph.input)  # an output may be an input as it is
    outputs = [value for value in original.graph.output if value.name in made]
    values = [helper.make_value_info(value.name, value.type) for value in outputs]
    for value in original.graph.output:
        own = chunks.get(value.name, ()) if value.name not in made else ()
        values += [helper.make_tensor_value_info(name, value.type.tensor_type.elem_type, None) for name in own]
    if not values:
        return None
    forward = copied(model)
    del forward.graph.output[:]
    forward.graph.output.extend(values)
    return part(forward)


def _joined(got: Arrays, chunks: Mapping[str, Sequence[str]], expected: Arrays) -> Arrays:
    """Outputs, of which those that came by chunks are whole."""
    whole = {
        name: np.concatenate([got[each] for each in own]).reshape(expected[name].shape)
        for name, own in chunks.items() if set(own) <= got.keys()
    }  # fmt: skip
    parts = {each for name in whole for each in chunks[name]}
    return {name: array for name, array in got.items() if name not in parts} | whole


def _allowed(outputs: Arrays, names: Sequence[str], original: Original) -> float:
    """How far outputs may be from those of the original."""
    narrow = any(outputs[name].dtype.itemsize < 4 for name in names)
    return HALF if narrow or any(node.op_type in ROUNDING for node in original.model.graph.node) else SINGLE


def _largest_difference(got: Arrays, expected: Arrays, names: Sequence[str]) -> float:
    return max((off(got[name], expected[name]) for name in names), default=0.0)


def _compared_in_double(
    original: Original, forward: ModelProto, names: Sequence[str], case: Case, noise: float
) -> Found:
    """Whether two models have the same outputs of these names in float64, where float32 can't tell for its noise."""
    told = f"a change in the last digits changes the original by {noise:.1e}"
    try:
        runs = DoubleExecutor(original.model), DoubleExecutor(forward)
        expected, got = (run(run.widened(case.feeds)) for run in runs)
    except Exception:  # the executors' exceptions share no base class
        return Found("skipped", f"of these data {told}")
    worst = _largest_difference(got, expected, names)
    status = "passed" if worst <= DOUBLE else "failed"
    return Found(status, f"largest relative difference {worst:.1e} in float64; {told}")
