"""Insert another model into the model that is being built: a loss from a file, or the teacher of a distillation.

A loss file is a model with the inputs `prediction` and `label` and one scalar output. It is converted to the model's
opset, and its types are inferred for the output that it is computed on. So a mismatch is found here and described in
terms of the two files, instead of failing later inside a rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from onnx import TypeProto, ValueInfoProto, numpy_helper

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.errors import OnnxgradError, UsageError, mismatch
from onnxgrad_cli.files import load_external_data, load_model
from onnxgrad_cli.ir.dialects import checker_error, repair
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import ROLE, Node, copied
from onnxgrad_cli.ir.renaming import rename
from onnxgrad_cli.ir.types import dtype_of, is_float, shape_of, tensor_type
from onnxgrad_cli.passes.prepare.infer_and_lower import settle_part
from onnxgrad_cli.passes.prepare.normalise import normalise
from onnxgrad_cli.passes.prepare.opset import convert


class ModelFile:
    """A model read from `path`, converted to the opset of `graph`.

    Args:
        path: the file.
        graph: the model that receives the nodes.
        by_run: True to run the file's model in order to find ranks that can't be inferred. None does so only if that is
            quick.

    Attributes:
        inputs: map from the name of each input without a stored value to its declaration, in order.

    Raises:
        OnnxgradError: the file can't be read.
        UsageError: the file has sparse tensors, or can't be converted.
    """

    kind = "model"

    def __init__(self, path: str, graph: Graph, by_run: bool | None = None) -> None:
        self.path, self._by_run = path, by_run
        try:
            model = load_model(path)[0]
            load_external_data(model, Path(path))  # external data are read beside the file, not beside the model
        except OnnxgradError as error:
            raise OnnxgradError(f"`losses`: {error.message}", error.hint, error.details, code=error.code) from error
        repair(model)
        self._graph = Graph(model, Path(path))
        if self._graph.proto.graph.sparse_initializer:
            raise self._unfit("has sparse initializers", "store them as dense initializers")
        normalise(self._graph)
        self._convert(graph)
        declared = self._graph.proto.graph.input
        self.inputs = {value.name: value for value in declared if value.name not in self._graph.initializers}

    def _unfit(self, what: str, hint: str) -> UsageError:
        return mismatch(f"the {self.kind} '{self.path}' {what}", hint or None)

    def _convert(self, graph: Graph) -> None:
        """Convert the file's model to the opset of `graph`. Import its other domains into `graph`."""
        theirs, ours = self._graph.opset(), graph.opset()
        if ours is not None and theirs not in (None, ours):
            fix = f"save the {self.kind} at opset {ours}"
            try:
                convert(self._graph, ours)
            except Exception as error:  # the converter raises RuntimeError, ConvertError and more
                reason = str(error).strip().splitlines()[-1].rpartition(": ")[2]
                raise self._unfit(
                    f"has opset {theirs}, but the model has opset {ours}, and the conversion failed: {reason}", fix
                ) from error
            normalise(self._graph)
            fault = checker_error(self._graph.skeleton()) if theirs > ours else ""
            if fault:  # the converter ignores operators that it can't convert
                raise self._unfit(
                    f"has opset {theirs}, and can't be converted to opset {ours} of the model: {fault}", fix
                )
        for entry in self._graph.proto.opset_import:
            if is_standard(entry.domain):
                continue
            version = graph.opset(entry.domain)
            if version is None:
                graph.proto.opset_import.append(entry)
            elif version != entry.version:
                raise self._unfit(
                    f"uses version {entry.version} of the domain {entry.domain}, but the model uses version {version}",
                    f"save it for version {version} of {entry.domain}",
                )

    def splice(self, op: Op, given: Mapping[str, Val]) -> dict[str, Val]:
        """Append the file's nodes and constants to `op`, and return its outputs.

        Args:
            op: the emitter.
            given: map from each of `inputs` to its value. The value is cast to the type that the file declares.

        Raises:
            UsageError: the types inside the file contradict each other for these values.
        """
        inner = self._graph
        values = {name: op.cast(value, dtype_of(self.inputs[name].type)) for name, value in given.items()}
        for name, value in values.items():
            assert value.type is not None
            self.inputs[name].type.CopyFrom(value.type)
        del inner.proto.graph.value_info[:]
        for output in inner.proto.graph.output:  # they may have been declared for other sizes of the inputs
            for dim in output.type.tensor_type.shape.dim:
                dim.Clear()
        inner.share_names(op.graph)  # an unnamed size of the file is not a size of the model
        try:
            settle_part(inner, op.training, self._by_run)
        except OnnxgradError as error:
            raise self._unfit(f"can't be applied to {self._fed(given)}: {error.message}", "") from error
        names = {name: value.name for name, value in values.items()}
        for name, tensor in inner.initializers.items():
            names[name] = op.graph.add_constant(numpy_helper.to_array(tensor), name)
        for node in inner.nodes:
            append_copy(op, node, names)
            for name in filter(None, node.output):
                op.graph.types[names[name]] = inner.types.get(name, TypeProto())
        return {name: op.val(names[name]) for name in inner.output_names}

    def _fed(self, given: Mapping[str, Val]) -> str:
        return ", ".join(f"'{value.name}'" for value in given.values())


def append_copy(op: Op, node: Node, names: dict[str, str]) -> Node:
    """Append a copy of a node to the nodes of `op`, and return it.

    Args:
        op: the emitter.
        node: the node.
        names: map from the values that the node reads to other values. The new names of its results are added.
    """
    names.update((name, op.graph.fresh(f"{op.scope}/{name}")) for name in node.output if name)
    copy = copied(node)
    copy.name = op.graph.fresh(f"{op.scope}/{node.name}")
    copy.metadata = {**copy.metadata, ROLE: op.role}
    rename([copy], names)
    op.nodes.append(copy)
    return copy


# -- a loss in a file -------------------------------------------------------------------------------------------------


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
        by_run: True to run the loss in order to find ranks that can't be inferred. None does so only if that is quick.

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
            UsageError: the file accepts only outputs of a different shape.
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
        given = {self._prediction.name: prediction}
        if self._label and label:
            given[self._label.name] = label
        ((output, result),) = self.splice(op, given).items()
        shape = result.known_shape
        if not is_float(result.type) or shape is None or any(dim != 1 for dim in shape):
            raise self._unfit(
                f"returns '{output}', which is not a float scalar", "reduce it to a scalar inside the file"
            )
        return op.squeeze(result, range(len(shape)))

    def _fed(self, given: Mapping[str, Val]) -> str:
        return f"the output '{given[self._prediction.name].name}'"
