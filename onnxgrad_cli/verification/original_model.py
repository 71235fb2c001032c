"""The inference model that a training model was made from, in the form in which a proof runs it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property
from pathlib import Path

import numpy as np
from onnx import ModelProto, numpy_helper

from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.files import load_external_data
from onnxgrad_cli.ir.node import refill
from onnxgrad_cli.ir.types import FLOATS, Arrays, is_external, is_float
from onnxgrad_cli.ir.weightless_copy import copied
from onnxgrad_cli.verification.feeds import part
from onnxgrad_cli.verification.gradients.loss_function import in_last_digits

ROUNDING = frozenset({"MatMulNBits", "QMoE"})
"""Operators whose attribute `accuracy_level` lets onnxruntime round their input. Gradients ignore this rounding."""


class Original:
    """The inference model, loaded once and run in full precision.

    The attribute that lets kernels round the inputs of quantized weights is removed.

    Args:
        model: the inference model; external data are relative to `path`. It is not changed.
        path: the file it was read from.
    """

    def __init__(self, model: ModelProto, path: Path | None) -> None:
        self.model = _unrounded(with_weights(model, path))
        self._types = {value.name: value.type for value in self.model.graph.input}
        self._last: tuple[Mapping[str, np.ndarray], Arrays] | None = None

    def with_outputs(self, names: Collection[str]) -> Original:
        """Return the model with other values as its outputs."""
        return Original(part(self.model, names), None)

    @cached_property
    def executor(self) -> Executor:
        """The executor that runs the model.

        Raises:
            Exception: neither onnxruntime nor onnx.reference loads it.
        """
        return Executor(self.model, threads=None)

    @property
    def loads(self) -> bool:
        """True if onnxruntime loads the model."""
        try:
            return not self.executor.by_reference
        except Exception:  # the executors' exceptions share no base class
            return False

    def __call__(self, feeds: Mapping[str, np.ndarray]) -> Arrays:
        """Return the model's outputs for feeds of its training model. The last result is cached.

        Raises:
            Exception: the model does not run on the feeds.
        """
        if self._last is None or self._last[0] is not feeds:
            self._last = feeds, self.executor(self._taken(feeds))
        return self._last[1]

    def noise(self, feeds: Mapping[str, np.ndarray], weights: Collection[str], rng: np.random.Generator) -> Arrays:
        """Return the model's outputs after its feeds and some weights are changed by a rounding error.

        Other stored floats stay the same, because sizes may be computed from them, such as the scales of Resize.

        Args:
            feeds: the feeds of its training model.
            weights: the names of the weights that change.
            rng: draws the changes.
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
    """Return a copy of the model with its external data loaded, or the model itself if it has none."""
    if not any(is_external(tensor) for tensor in model.graph.initializer):
        return model
    loaded = copied(model)
    load_external_data(loaded, path)
    return loaded


def _unrounded(model: ModelProto) -> ModelProto:
    """Return the model without the attribute that lets kernels round inputs to integers when weights are quantized."""
    if not any(node.op_type in ROUNDING for node in model.graph.node):
        return model
    model = copied(model)
    for node in model.graph.node:
        if node.op_type in ROUNDING:
            refill(node.attribute, (attribute for attribute in node.attribute if attribute.name != "accuracy_level"))
    return model
