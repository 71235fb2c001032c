"""Biases that a file stores as int32, rounded in training as they are in the file.

A kernel of integers adds a bias to products of integers as it is, so that it is a multiple of the product of their
scales. No runtime quantizes to int32: q = round(b / s) s is written out, and what is read is b + (q - b), of which the
bracket counts as a constant. In floats that sum is q exactly (P. Sterbenz, Floating-Point Computation, 1974, section
4.3: of two numbers within a factor of 2 the difference is exact), and its derivative is that of b: the straight-through
estimator.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.metadata import IntegerWeight
from onnxgrad_cli.record import ParameterRecord


def round_biases(graph: Graph, training: ParameterRecord, steps: Mapping[str, np.ndarray]) -> None:
    """Let what reads the biases of a model read what its file will hold of them.

    Those stay as they are that nothing moves: neither they are trained nor the scales that theirs follows.

    Args:
        graph: with float biases; changed in place.
        training: knows the integers that they are, and what is trained.
        steps: the scale of each, so that it broadcasts with it.
    """
    if not steps:
        return
    weights = {weight.weight: weight for weight in training.integer_weights}
    op, rounded, uses, trained = Op(graph), dict[str, str](), graph.uses(), set(training.trained)
    for name, step in steps.items():
        if not trained.isdisjoint((name, *weights[name].factors)):
            op.scope = uses[name][0][0].name
            rounded[name] = _rounded(op, op.val(name), _step(op, weights[name], step, trained)).name
    for node in graph.nodes:
        node.input[:] = [rounded.get(each, each) for each in node.input]
    graph.set_nodes([*op.nodes, *graph.nodes])


def _rounded(op: Op, bias: Val, step: Val) -> Val:
    wide = op.wide(bias)
    off = op.cast(op.Round(wide / step) * step, bias) - bias
    op.graph.held.add(off.name)
    return bias + off


def _step(op: Op, bias: IntegerWeight, stored: np.ndarray, trained: Collection[str]) -> Val:
    """The scale of a bias: as it is stored, or where one of the two that it follows is trained, their product."""
    if not any(name in trained for name in bias.factors):
        return op.const(stored.astype(np.float32), 1)
    first, *others = (op.reshape(op.wide(op.val(name)), [-1]) for name in bias.factors)
    product = first if bias.times == 1 else first * bias.times
    for other in others:
        product = product * other
    return product
