"""Any loss as a file: a model with the inputs prediction and label and one scalar output, spliced in as it is.

It is brought to the model's opset and typed for the output it judges, so that what doesn't fit is refused here,
in the terms of the two files, and not later inside a rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from onnx import TypeProto, ValueInfoProto, numpy_helper

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.files import load_model, tensors
from onnxgrad_cli.ir.dialects import complaint, mend
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import ROLE, copied
from onnxgrad_cli.ir.renaming import rename
from onnxgrad_cli.ir.types import dtype_of, is_external, is_float, shape_of, tensor_type
from onnxgrad_cli.passes.prepare.normalise import normalise
from onnxgrad_cli.passes.prepare.opset import convert
from onnxgrad_cli.passes.prepare.settle import settle_part

_AT = "save the loss at opset {}"

ORDER = {"prediction": 0, "label": 2}
"""Where an input that is called so stands; one of another name stands between."""


def in_order(inputs: Sequence[ValueInfoProto]) -> list[ValueInfoProto]:
    """The inputs of a file that judges: the prediction, then the label; by these names, else as the file has them."""
    return sorted(inputs, key=lambda value: ORDER.get(value.name, 1))


class LossFile:
    """A loss read from `path`, brought to the opset of `graph`.

    Args:
        path: the file.
        graph: the model that the loss is appended to.
        by_run: read ranks that can't be inferred off a run of the loss; None does so if that is quick.

    Raises:
        UsageError: it is no valid model, its inputs or outputs are not those of a loss, or its opset can't be had.
    """

    def __init__(self, path: str, graph: Graph, by_run: bool | None = None) -> None:
        self.path, self._by_run = path, by_run
        try:
            model = load_model(path)[0]
        except OnnxgradError as error:
            raise UsageError(f"`losses`: {error.message}", error.hint, error.details) from error
        mend(model)
        self._graph = Graph(model, Path(path))
        if any(map(is_external, tensors(model))):  # those of nodes too: they would be looked for beside the model
            raise self._unfit("keeps tensors in another file", "save it with its tensors inside")
        if self._graph.proto.graph.sparse_initializer:
            raise self._unfit("has sparse initializers", "store them as dense ones")
        normalise(self._graph)
        self._convert(graph)
        inputs = [v for v in self._graph.proto.graph.input if v.name not in self._graph.initializers]
        outputs = self._graph.output_names
        if len(inputs) not in (1, 2):
            extra = "".join(f", '{value.name}'" for value in inputs[2:])
            raise self._unfit(
                f"has {len(inputs)} inputs{extra and ': beside prediction and label'}{extra}",
                "a loss takes a prediction and a label; store everything else inside the file",
            )
        if len(outputs) != 1:
            raise self._unfit(f"has {len(outputs)} outputs", "a loss has one, a scalar")
        self._prediction, *others = in_order(inputs)
        self._label = others[0] if others else None
        if not is_float(self._prediction.type):
            raise self._unfit(f"takes a prediction '{self._prediction.name}' that is no float tensor", "")

    def _unfit(self, what: str, hint: str) -> UsageError:
        return UsageError(f"the loss '{self.path}' {what}", hint or None)

    def _convert(self, graph: Graph) -> None:
        """Take the loss to the model's opset; let the model import the other domains that the loss uses."""
        theirs, ours = self._graph.opset(), graph.opset()
        if ours is not None and theirs not in (None, ours):
            try:
                convert(self._graph, ours)
            except Exception as error:  # the converter raises RuntimeError, ConvertError and more
                reason = str(error).strip().splitlines()[-1].rpartition(": ")[2]
                raise self._unfit(
                    f"is at opset {theirs}, the model at {ours}, and it can't be converted: {reason}",
                    _AT.format(ours),
                ) from error
            normalise(self._graph)
            fault = complaint(self._graph.skeleton()) if theirs > ours else ""
            if fault:  # the converter says nothing of what it can't convert
                raise self._unfit(
                    f"is at opset {theirs}, and has no form at the model's, {ours}: {fault}", _AT.format(ours)
                )
        for entry in self._graph.proto.opset_import:
            if is_standard(entry.domain):
                continue
            version = graph.opset(entry.domain)
            if version is None:
                graph.proto.opset_import.append(entry)
            elif version != entry.version:
                raise self._unfit(
                    f"uses {entry.domain} {entry.version}, the model {version}", f"save it for {entry.domain} {version}"
                )

    def label_type(self, prediction: Val, given: Mapping[str, object]) -> TypeProto | None:
        """The type of the label for an output: the file's symbols are the output's sizes. None without a label.

        It takes no options, so that what is `given` says nothing to it.

        Raises:
            UsageError: the file takes an output of another shape.
        """
        declared, shape = shape_of(self._prediction.type), prediction.known_shape
        sizes = {}
        if declared is not None and shape is not None:
            sizes = dict(zip(declared, shape, strict=False))
            apart = any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in sizes.items())
            if apart or len(declared) != len(shape):
                raise self._unfit(
                    f"takes a prediction [{', '.join(map(str, declared))}]; "
                    f"'{prediction.name}' is [{', '.join(map(str, shape))}]",
                    "choose another output with NAME:OUTPUT, or give the file symbolic axes",
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
            UsageError: the types inside contradict each other for this output, or the result is no scalar.
        """
        inner = self._graph
        prediction = op.cast(prediction, dtype_of(self._prediction.type))
        given = {self._prediction.name: prediction, **({self._label.name: label} if self._label and label else {})}
        for value in inner.proto.graph.input:
            if value.name in given:
                value.type.CopyFrom(given[value.name].type)
        del inner.proto.graph.value_info[:]
        inner.share_names(op.graph)  # its sizes without a name are none of the model's
        try:
            settle_part(inner, op.training, self._by_run)
        except OnnxgradError as error:
            raise self._unfit(f"does not fit the output '{prediction.name}': {error.message}", "") from error
        (output,) = inner.output_names
        shape = shape_of(inner.types[output])
        if not is_float(inner.types[output]) or shape is None or any(dim != 1 for dim in shape):
            raise self._unfit(f"gives '{output}', which is no float scalar", "reduce it inside the file")
        result = self._splice(op, given)[output]
        return op.squeeze(op.val(result), range(len(shape)))

    def _splice(self, op: Op, given: Mapping[str, Val]) -> dict[str, str]:
        """Copy the loss's nodes and constants into `op`; returns name in the file -> name in the model."""
        inner, names = self._graph, {name: value.name for name, value in given.items()}
        for name, tensor in inner.initializers.items():
            names[name] = op.graph.add_constant(numpy_helper.to_array(tensor), name)
        for node in inner.nodes:
            for name in node.output:
                if name:
                    names[name] = op.graph.fresh(f"{op.scope}/{name}")
                    op.graph.types[names[name]] = inner.types.get(name, TypeProto())
            copy = copied(node)
            copy.name = op.graph.fresh(f"{op.scope}/{node.name}")
            copy.metadata = {**copy.metadata, ROLE: op.role}
            rename([copy], names)
            op.nodes.append(copy)
        return names
