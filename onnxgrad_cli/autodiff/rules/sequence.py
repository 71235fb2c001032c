"""Rules of sequences and optionals. The cotangent of a sequence is a sequence of the same length.

`passes/prepare/unpack_sequences.py` removes sequences whose length is known at build time. These rules are for
sequences of unknown length, such as those that grow in loops. Source: the operators' pages.
"""

from __future__ import annotations

from onnxgrad_cli.autodiff.registry import formula_rule, no_gradient, rule
from onnxgrad_cli.emission import bodies
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val

no_gradient("SequenceLength OptionalHasElement")


formula_rule("SequenceEmpty", lambda op, g, y, *, dtype: ())
formula_rule("Optional", lambda op, g, y, x, *, type: g)
formula_rule("OptionalGetElement", lambda op, g, y, x: g)


@rule("SequenceConstruct", needs_opset=17)
def sequence_construct(op, g, y, *xs):
    return [op.SequenceAt(g, op.const(i), shape=x.known_shape) for i, x in enumerate(xs)]


@rule("SequenceAt", needs_opset=17)
def sequence_at(op, g, y, s, position):
    zeros = op.SequenceErase(bodies.zeros_like(op, s), position)
    return op.SequenceInsert(zeros, g, _counted(op, s, position)), None


@rule("SequenceInsert", needs_opset=17)
def sequence_insert(op, g, y, s, x, position):
    at = op.const(-1) if position is None else _counted(op, s, position)
    return op.SequenceErase(g, at), op.SequenceAt(g, at, shape=x.known_shape), None


@rule("SequenceErase", needs_opset=17)
def sequence_erase(op, g, y, s, position):
    position = op.const(-1) if position is None else position
    zero = op.fill(0.0, op.SequenceAt(s, position))
    return op.SequenceInsert(g, zero, _counted(op, s, position)), None


@rule("ConcatFromSequence", needs_opset=17)
def concat_from_sequence(op, g, y, s, *, axis, new_axis):
    if new_axis:
        return op.SplitToSequence(g, axis=axis, keepdims=0)
    sizes = bodies.map_elements(op, lambda op, x: op.Gather(op.Shape(x), op.ints([axis])), s)
    return op.SplitToSequence(g, op.ConcatFromSequence(sizes, axis=0), axis=axis)


@rule("SplitToSequence", needs_opset=17)
def split_to_sequence(op, g, y, x, split, *, axis, keepdims):
    whole = op.ConcatFromSequence(g, axis=axis, new_axis=int(split is None and not keepdims))
    return op.state(whole, x.known_shape), None


def _counted(op: Op, s: Val, position: Val) -> Val:
    """Return a position in the sequence `s`, counted from the start. A negative `position` counts from the end."""
    if position.const is not None and position.const.item() >= 0:
        return position
    at = op.cast(position, 7)
    return op.Where(at < 0, at + op.SequenceLength(s), at)
