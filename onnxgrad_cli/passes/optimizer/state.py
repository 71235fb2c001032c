"""Add the optimizer's state as inputs of the model, each with a description of its initial value.

The initial value is also stored, as an initializer that the input overrides. It is not stored if the user doesn't want
embedded state, or if the weights are so large that the file would mostly consist of zeros.
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

MAX_STORED_BYTES = 1 << 28
"""Total size of the weights, in bytes, above which the optimizer's state is not stored in the model.

The state can take twice the size of the weights, which every reader of the file would load.
"""


class OptimizerState:
    """Adds the inputs that hold the state of the optimizer, and records each of them."""

    def __init__(self, graph: Graph, options: StepOptions, training: SelectionRecord) -> None:
        self._graph, self._embed, self._slots = graph, options.embed_state, training.slots
        size = sum(nbytes(graph.initializers[name]) for name in training.trained)
        if self._embed and size > MAX_STORED_BYTES and not options.training_info:
            self._embed = False
            text = (
                f"the weights take {size / 1e9:.1f} GB, so the model does not store the initial state of the "
                "optimizer: pass it as inputs"
            )
            training.cautions.append(Caution("note", "`embed_state`", text))

    def scalar(self, op: Op, kind: str, value: float, dtype: int) -> Val:
        """Add a scalar state for the whole model, named `kind`, that starts at `value`.

        Args:
            op: the emitter.
            kind: the name.
            value: the initial value.
            dtype: the element type, a TensorProto.DataType.
        """
        return self._make(op, "", kind, value, dtype, ())

    def like_weight(self, op: Op, weight: str, kind: str, value: float, dtype: int) -> Val:
        """Add a state with the shape of a weight, named `<weight>_<kind>`, whose elements all start at `value`."""
        return self._make(op, weight, kind, value, dtype, tuple(self._graph.initializers[weight].dims))

    def _make(self, op: Op, weight: str, kind: str, value: float, dtype: int, shape: tuple[int, ...]) -> Val:
        graph, name = self._graph, self._graph.fresh(f"{weight}_{kind}" if weight else kind)
        array = np.dtype(helper.tensor_dtype_to_np_dtype(dtype))
        if self._embed:
            graph.add_initializer(name, np.full(shape, value, array))
        graph.add_input(name, tensor_type(dtype, shape))
        self._slots[name] = Slot(weight, kind, array.name, shape, value)
        return op.val(name)
