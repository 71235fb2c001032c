"""Warnings about weights that stay untrained though nobody asked for that."""

from __future__ import annotations

import math
from collections.abc import Iterator

from onnxgrad_cli.common.wording import listed
from onnxgrad_cli.errors import Caution
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.options import SelectionOptions
from onnxgrad_cli.passes.quantized_matrices import IntegerWeights, integer_weights
from onnxgrad_cli.record import SelectionRecord

UNTRAINED = "untrained"
"""The kind of these warnings."""

LARGEST_SHARE = 0.01
"""Share of a model's float parameters up to which untrained ones are normal: masks, tables of positions, statistics."""

CERTAIN = frozenset({"setting", "exporter", "scalar"})
"""Heuristics whose decisions need no warning: the file says so, or the tensor is a single number."""


def untrained(graph: Graph, options: SelectionOptions, training: SelectionRecord) -> Iterator[Caution]:
    """Yield warnings about floats and stored integers that stay untrained, unless options choose what is trained."""
    if options.train or options.freeze or options.preset or options.train_last or options.lora:
        return
    yield from _floats(graph, training)
    yield from _integers(integer_weights(graph), options)


def _floats(graph: Graph, training: SelectionRecord) -> Iterator[Caution]:
    counts = {name: math.prod(tensor.dims) for name, tensor in graph.initializers.items()}
    left = {
        name: counts[name]
        for name in training.not_trained
        if name in counts and name not in training.state and training.heuristics.get(name) not in CERTAIN
    }
    count, trained = sum(left.values()), sum(counts[name] for name in training.trained)
    if not trained or count <= LARGEST_SHARE * (count + trained):
        return
    largest = max(left, key=lambda name: left[name])
    decided = largest in training.heuristics
    reason = training.not_trained[largest].removesuffix(" (name it with `train` to train it)")
    text = f"{count:,} of {count + trained:,} float parameters ({count / (count + trained):.0%}) stay untrained"
    text += f"; the largest tensor is '{largest}' ({left[largest]:,}): {reason}"
    text += f". `train='*'` with `train={largest!r}` trains it too" if decided else ""
    yield Caution(UNTRAINED, "", text)


def _integers(weights: IntegerWeights, options: SelectionOptions) -> Iterator[Caution]:
    if not weights.counts:
        return
    count, names = sum(weights.counts.values()), list(weights.counts)
    named = listed(names[:3]) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")
    text = f"{count:,} parameters are stored as integers and stay untrained: {named}"
    if weights.dequantized and not options.straight_through:
        text += ". `quantization='ste'` trains them"
    elif weights.matrices:
        text += ". `lora=8` trains adapters beside them"
    yield Caution(UNTRAINED, "", text)
