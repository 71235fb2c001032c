"""Check that a training model still computes the outputs of the original model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from onnx import ModelProto, helper, numpy_helper

from onnxgrad_cli.execution.double import DoubleExecutor
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.ir.node_values import reads
from onnxgrad_cli.ir.types import Arrays
from onnxgrad_cli.metadata import InnerEvaluation, Roles
from onnxgrad_cli.verification.case import NOTHING, CheckOutcome, ProofCase, skipped
from onnxgrad_cli.verification.feeds import part, run_on_own, with_proof_part
from onnxgrad_cli.verification.gradients.judgement import off
from onnxgrad_cli.verification.original_model import Original

SINGLE, HALF, DOUBLE = 1e-4, 2e-2, 1e-6
"""Largest accepted difference of an output, relative to its largest entry.

In this order: for float32; for outputs of less than 32 bits and models with operators in `ROUNDING`; for float64.
"""

AMPLIFIED = 1e-2
"""If a rounding error in the data changes an output by more than this fraction, outputs are compared in float64."""

ROUNDING = frozenset({"DynamicQuantizeLSTM", "QMoE"})
"""Operators with quantized weights whose kernels also round the values that they multiply with the weights.

QMoE does so for blockwise 8-bit weights.
"""


def computes_the_original(case: ProofCase) -> CheckOutcome:
    """Compare the training model's outputs with the outputs of the same names in the original.

    Further evaluations of the model, for data sets and inside the loss, are compared, too.
    """
    original = case.original
    if original is None:
        return NOTHING
    whole = with_proof_part(case.described)
    copies = [_copy_agrees(case, original, whole, *each) for each in _evaluations(case.roles, original.model)]
    failed = next((outcome for outcome in copies if outcome.status == "failed"), None)
    if failed is not None:
        return failed
    chunks = {term.output: term.chunks for term in case.roles.losses if term.chunks}
    forward = _forward(case.described.model, original.model, chunks)
    if forward is None and (last := _last_shared(case.described.model, original.model)):
        # The loss reads only derivatives of the outputs. The last values that both models compute are compared instead.
        original = original.with_outputs(last)
        forward = _forward(case.described.model, original.model, chunks)
    if forward is None:
        passed = [outcome for outcome in copies if outcome.status == "passed"]
        return passed[0] if passed else skipped("the loss is computed on a value that is not an output of the original")
    try:  # the training model may run where the original model does not
        expected = original(case.feeds)
    except Exception as error:  # the executors' exceptions share no base class
        return skipped(f"the original does not run: {str(error).strip()[:500]}")
    inputs = {name: x for name, x in case.feeds.items() if name in case.roles.fed}  # with the stored weights
    got = _joined(Executor(forward, fallback=False, threads=None)(inputs), chunks, expected)
    found, noise = _compared(case, original, got, expected, case.feeds)
    if noise > AMPLIFIED and found.status == "passed" and not chunks:
        return _compared_in_double(original, forward, list(got), case, noise)
    return found


def _compared(
    case: ProofCase, original: Original, got: Arrays, expected: Arrays, feeds: Arrays
) -> tuple[CheckOutcome, float]:
    """Compare outputs with those of the original for `feeds`.

    Returns:
        The outcome, and how much rounding errors in the feeds change the outputs; 0 if that was not measured.
    """
    narrow = any(x.dtype.itemsize < 4 for x in got.values())
    allowed = HALF if narrow or any(node.op_type in ROUNDING for node in original.model.graph.node) else SINGLE
    worst, noise = _largest_difference(got, expected, got), 0.0
    if worst > allowed:  # perhaps due to rounding on these data
        noise = _largest_difference(original.noise(feeds, case.roles.gradients, case.rng), expected, got)
    status = "passed" if worst <= allowed + 10 * noise else "failed"
    return CheckOutcome(status, f"largest relative difference {worst:.1e} ({original.executor.name})"), noise


def _evaluations(roles: Roles, original: ModelProto) -> Iterator[tuple[str, InnerEvaluation]]:
    """Yield each further evaluation of the model, for data sets and inside the loss, with its place in words."""
    for data in list(roles.sets)[1:]:
        outputs = {value.name: f"{data}/{value.name}" for value in original.graph.output}
        yield f"on the data set '{data}'", InnerEvaluation(roles.sets[data], outputs)
    yield from (("on other inputs in the loss", each) for each in roles.evaluated)


def _copy_agrees(
    case: ProofCase, original: Original, whole: ModelProto, where: str, copy: InnerEvaluation
) -> CheckOutcome:
    """Compare the outputs of a further evaluation of the model with those of the original for the same inputs.

    Args:
        case: the case.
        original: the original.
        whole: the training model with the nodes that only proofs need.
        where: the place of the evaluation, in words.
        copy: the evaluation.
    """
    made = {name for node in whole.graph.node for name in node.output}
    stored = {tensor.name: tensor for tensor in whole.graph.initializer if tensor.name in copy.inputs.values()}
    outputs = [value for value in original.model.graph.output if copy.outputs.get(value.name) in made]
    values = [helper.make_value_info(copy.outputs[value.name], value.type) for value in outputs]
    if not values:
        return NOTHING
    computed = [name for name in copy.inputs.values() if name in made.difference(case.feeds)]
    inputs = {name: x for name, x in case.feeds.items() if name in case.roles.fed}  # with the stored weights
    found = run_on_own(part(whole, [*values, *computed]), inputs)
    known = {**{name: numpy_helper.to_array(tensor) for name, tensor in stored.items()}, **case.feeds, **found}
    fed = {name: known[own] for name, own in copy.inputs.items() if own in known}
    try:  # the training model may run where the original model does not
        expected = original(fed)
    except Exception:  # the executors' exceptions share no base class
        return NOTHING
    got = {value.name: found[copy.outputs[value.name]] for value in outputs}
    got = {name: x for name, x in got.items() if isinstance(x, np.ndarray)}
    outcome, _ = _compared(case, original, got, expected, fed)
    return replace(outcome, detail=f"{where}: {outcome.detail}")


def _forward(model: ModelProto, original: ModelProto, chunks: Mapping[str, Sequence[str]]) -> ModelProto | None:
    """Return the part of a training model that computes the outputs of the original model.

    If an output is computed in chunks of tokens, the part has one output for each chunk instead. Return None if the
    training model computes no output of the original.
    """
    made = {name for node in model.graph.node for name in node.output}
    made.update(value.name for value in model.graph.input)  # an output may be an input
    outputs = [value for value in original.graph.output if value.name in made]
    values = [helper.make_value_info(value.name, value.type) for value in outputs]
    for value in original.graph.output:
        own = chunks.get(value.name, ()) if value.name not in made else ()
        values += [helper.make_tensor_value_info(name, value.type.tensor_type.elem_type, None) for name in own]
    return part(model, values) if values else None


def _last_shared(model: ModelProto, original: ModelProto) -> list[str]:
    """Return the last values that both models compute: those from which the original computes no other shared value."""
    made = {name for node in model.graph.node for name in node.output if name}
    shared = [node for node in original.graph.node if not made.isdisjoint(node.output)]
    read = {name for node in shared for name in reads(node)}
    return [name for node in shared for name in node.output if name in made and name not in read]


def _joined(got: Arrays, chunks: Mapping[str, Sequence[str]], expected: Arrays) -> Arrays:
    """Return the tensors among the outputs of a run. Each output that was computed in chunks is joined to one array."""
    whole = {
        name: np.concatenate([got[each] for each in own]).reshape(expected[name].shape)
        for name, own in chunks.items() if set(own) <= got.keys()
    }  # fmt: skip
    parts = {each for name in whole for each in chunks[name]}
    return {name: x for name, x in got.items() if isinstance(x, np.ndarray) and name not in parts} | whole


def _largest_difference(got: Arrays, expected: Arrays, names: Iterable[str]) -> float:
    return max((off(got[name], expected[name]) for name in names), default=0.0)


def _compared_in_double(
    original: Original, forward: ModelProto, names: Sequence[str], case: ProofCase, noise: float
) -> CheckOutcome:
    """Compare the outputs of two models in float64, because rounding changes them too much in float32."""
    told = f"a change in the last digits of the data changes the outputs of the original by {noise:.1e}"
    try:
        expected, got = (DoubleExecutor(model).on(case.feeds) for model in (original.model, forward))
    except Exception:  # the executors' exceptions share no base class
        return skipped(told)
    worst = _largest_difference(got, expected, names)
    status = "passed" if worst <= DOUBLE else "failed"
    return CheckOutcome(status, f"largest relative difference {worst:.1e} in float64; {told}")
