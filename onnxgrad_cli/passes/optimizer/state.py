"""What an optimizer remembers from step to step: inputs of the model, each with a description of how it begins.

Such an input is stored too, as an overridable initializer, unless the state is not to be embedded, or the weights are
so large that the zeros it begins with would be most of a large file.
"""

from __future__ import annotations

import numpy as np
from onnx import helper

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.errors import Caution
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.types import nbytes, tensor_type
from onnxgrad_cli.metadata import Slot
from onnxgrad_cli.options import StepOptions
from onnxgrad_cli.record import SelectionRecord

LARGE = 1 << 28
"""The bytes of weights from which on state is not stored: it can take twice as many, and whoever opens the file reads
them twice over."""


class OptimizerState:
    """Adds the inputs that hold the state of the optimizer, and describes each of them."""

    def __init__(self, graph: Graph, options: StepOptions, training: SelectionRecord) -> None:
        self._graph, self._embed, self._slots = graph, options.embed_state, training.slots
        size = sum(nbytes(graph.initializers[name]) for name in training.trained)
        if self._embed and size > LARGE and not options.training_info:
            self._embed = False
            text = f"the weights take {size / 1e9:.1f} GB: the optimizer's state is described, not stored"
            training.cautions.append(Caution("note", "`embed_state`", text))

    def scalar(self, op: Op, kind: str, value: float, dtype: int) -> Val:
        """A scalar of the whole model, called `kind`; `dtype` is a TensorProto.DataType."""
        return self._make(op, "", kind, value, dtype, ())

    def like_weight(self, op: Op, weight: str, kind: str, value: float, dtype: int) -> Val:
        """A tensor of the shape of a weight, called `<weight>_<kind>`."""
        return self._make(op, weight, kind, value, dtype, tuple(self._graph.initializers[weight].dims))

    def _make(self, op: Op, weight: str, kind: str, value: float, dtype: int, shape: tuple[int, ...]) -> Val:
        graph, name = self._graph, self._graph.fresh(f"{weight}_{kind}" if weight else kind)
        array = np.dtype(helper.tensor_dtype_to_np_dtype(dtype))
        if self._embed:
            graph.add_initializer(name, np.full(shape, value, array))
        graph.add_input(name, tensor_type(dtype, shape))
        self._slots[name] = Slot(weight, kind, array.name, shape, value)
        return op.val(name)
