"""The inference model that a training model was made from, as a proof runs it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property
from pathlib import Path

import numpy as np
from onnx import ModelProto, numpy_helper

from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.files import load_external_data
from onnxgrad_cli.ir.skeleton import copied
from onnxgrad_cli.ir.types import FLOATS, Arrays, is_external, is_float
from onnxgrad_cli.verification.loss_function import in_last_digits

ROUNDING = frozenset({"MatMulNBits", "QMoE"})
"""Operators whose attribute `accuracy_level` lets onnxruntime round; no gradient is that of what is rounded."""


class Original:
    """The inference model, opened once; its kernels must not round what they multiply with quantized weights.

    Args:
        model: the inference model; external data are relative to `path`. It is not changed.
        path: where it was read from.
    """

    def __init__(self, model: ModelProto, path: Path | None) -> None:
        self.model = _unrounded(with_weights(model, path))
        self._types = {value.name: value.type for value in self.model.graph.input}
        self._last: tuple[Mapping[str, np.ndarray], Arrays] | None = None

    @cached_property
    def executor(self) -> Executor:
        """What runs it.

        Raises:
            Exception: neither onnxruntime nor onnx.reference loads it.
        """
        return Executor(self.model, threads=None)

    @property
    def loads(self) -> bool:
        """Whether onnxruntime loads it."""
        try:
            return not self.executor.by_reference
        except Exception:  # the executors' exceptions share no base class
            return False

    def __call__(self, feeds: Mapping[str, np.ndarray]) -> Arrays:
        """Its outputs on feeds for its training model; those of the last feeds are kept.

        Raises:
            Exception: it does not run on them.
        """
        if self._last is None or self._last[0] is not feeds:
            self._last = feeds, self.executor(self._taken(feeds))
        return self._last[1]

    def noise(self, feeds: Mapping[str, np.ndarray], weights: Collection[str], rng: np.random.Generator) -> Arrays:
        """Its outputs on feeds and with weights of these names that their precision hardly tells from its own.

        Not any float may change so: sizes are computed from some, as from the scales of Resize.
        """
        taken = self._taken(feeds).items()
        near = {name: in_last_digits(x, rng) if is_float(self._types[name]) else x for name, x in taken}
        changed = copied(self.model)
        for tensor in changed.graph.initializer:
            if tensor.name in weights and tensor.data_type in FLOATS:
                values = in_last_digits(numpy_helper.to_array(tensor), rng)
                tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
        return Executor(changed)(near)

    def _taken(self, feeds: Mapping[str, np.ndarray]) -> Arrays:
        return {name: x for name, x in feeds.items() if name in self._types}


def with_weights(model: ModelProto, path: Path | None) -> ModelProto:
    """The model with its external data loaded, as a copy where there are any; else the model itself."""
    if not any(is_external(tensor) for tensor in model.graph.initializer):
        return model
    loaded = copied(model)
    load_external_data(loaded, path)
    return loaded


def _unrounded(model: ModelProto) -> ModelProto:
    """The model, whose kernels must not round what they multiply with quantized weights to integers."""
    if not any(node.op_type in ROUNDING for node in model.graph.node):
        return model
    model = copied(model)
    for node in model.graph.node:
        if node.op_type in ROUNDING:
            kept = [attribute for attribute in node.attribute if attribute.name != "accuracy_level"]
            del node.attribute[:]
            node.attribute.extend(kept)
    return model
