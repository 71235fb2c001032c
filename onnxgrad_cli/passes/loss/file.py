"""Use an ONNX file as loss: a model with the inputs `prediction` and `label` and one scalar output.

The loss is converted to the model's opset, and its types are inferred for the output that it is computed on. So a
mismatch is found here and described in terms of the two files, instead of failing later inside a rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onnx import TypeProto, ValueInfoProto

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.types import dtype_of, is_float, shape_of, tensor_type
from onnxgrad_cli.passes.loss.model_file import ModelFile

ORDER = {"prediction": 0, "label": 2}
"""Map from an input's name to its sort key among the inputs of a loss file. Other names have the key 1."""


def in_order(inputs: Sequence[ValueInfoProto]) -> list[ValueInfoProto]:
    """Return the inputs of a loss file in order: `prediction` first, `label` last, others in between."""
    return sorted(inputs, key=lambda value: ORDER.get(value.name, 1))


class LossFile(ModelFile):
    """A loss read from `path`, converted to the opset of `graph`; see `ModelFile`.

    Args:
        path: the file.
        graph: the model that the loss is appended to.
        by_run: run the loss to find ranks that can't be inferred; None does so if that is quick.

    Raises:
        OnnxgradError: the file can't be read.
        UsageError: the file is not a valid model, has other inputs or outputs than a loss, or can't be converted to the
            model's opset.
    """

    kind = "loss"

    def __init__(self, path: str, graph: Graph, by_run: bool | None = None) -> None:
        super().__init__(path, graph, by_run)
        inputs = list(self.inputs.values())
        outputs = self._graph.output_names
        if len(inputs) not in (1, 2):
            extra = "".join(f", '{value.name}'" for value in inputs[2:])
            raise self._unfit(
                f"has {len(inputs)} inputs{extra and ', and more than prediction and label'}{extra}",
                "give the file the inputs prediction and label, and store everything else inside the file",
            )
        if len(outputs) != 1:
            raise self._unfit(f"has {len(outputs)} outputs", "give the file one output, a scalar")
        self._prediction, *others = in_order(inputs)
        self._label = others[0] if others else None
        if not is_float(self._prediction.type):
            raise self._unfit(
                f"has an input '{self._prediction.name}' for the prediction that is not a float tensor", ""
            )

    def label_type(self, prediction: Val, given: Mapping[str, object]) -> TypeProto | None:
        """Return the type that the label must have for a given prediction, or None if the loss has no label.

        Symbols in the label's declared shape are replaced by the sizes that they have in the prediction. A loss file
        has no options, so `given` is ignored.

        Raises:
            UsageError: the file accepts only outputs of another shape.
        """
        declared, shape = shape_of(self._prediction.type), prediction.known_shape
        sizes = {}
        if declared is not None and shape is not None:
            sizes = dict(zip(declared, shape, strict=False))
            apart = any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in sizes.items())
            if apart or len(declared) != len(shape):
                raise self._unfit(
                    f"expects a prediction of shape [{', '.join(map(str, declared))}], but '{prediction.name}' "
                    f"has the shape [{', '.join(map(str, shape))}]",
                    "choose another output with NAME:OUTPUT, or give the inputs of the file symbolic axes",
                )
        if self._label is None:
            return None
        dims = shape_of(self._label.type)
        if dims is None:
            return self._label.type
        known = [sizes.get(dim, None if dim == "?" else dim) if isinstance(dim, str) else dim for dim in dims]
        return tensor_type(dtype_of(self._label.type), known)

    def __call__(self, op: Op, prediction: Val, label: Val | None) -> Val:
        """Write the loss into `op`, and return its scalar.

        Raises:
            UsageError: the inner types contradict each other for this output, or the result is not a scalar.
        """
        given = {self._prediction.name: prediction, **({self._label.name: label} if self._label and label else {})}
        ((output, result),) = self.splice(op, given).items()
        shape = result.known_shape
        if not is_float(result.type) or shape is None or any(dim != 1 for dim in shape):
            raise self._unfit(
                f"returns '{output}', which is not a float scalar", "reduce it to a scalar inside the file"
            )
        return op.squeeze(result, range(len(shape)))

    def _fed(self, given: Mapping[str, Val]) -> str:
        return f"the output '{given[self._prediction.name].name}'"
