"""BatchNormalization and Dropout behave differently in training; a file says which, and `--mode` overrides it.

Batch statistics are written out as ReduceMean and arithmetic: onnxruntime's BatchNormalization(training_mode=1)
overwrites its own running statistics, even where they are shared constants or fed arrays. Dropout hands out its mask,
which its gradient needs.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import NodeProto

from onnxgrad_cli.autodiff.rules.norm import through_batch_statistics
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.fusion import Fusion
from onnxgrad_cli.errors import Caution, Refusal, UnsupportedError
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.nodes import subgraphs, with_bodies
from onnxgrad_cli.ir.types import is_external, shape_of
from onnxgrad_cli.options import ModeOptions
from onnxgrad_cli.record import ModeRecord

MOMENTUM, EPSILON = 0.9, 1e-5


def apply_mode(graph: Graph, options: ModeOptions, training: ModeRecord) -> bool:
    """Rewrite BatchNormalization and Dropout as `options.mode` asks ('keep': as the model has it).

    In training, BatchNormalization uses the statistics of the batch, and `training.state` tells where the next
    running statistics are: momentum * running + (1 - momentum) * statistic of the batch, with the population
    variance, as the ONNX operator has it. (PyTorch's momentum is one minus this one, and it takes the unbiased
    variance, which is count / (count - 1) times as large.)

    Returns:
        Whether the graph changed; types must be inferred again then.

    Raises:
        UnsupportedError: a BatchNormalization in training reads a value of unknown rank.
    """
    refusals: list[Refusal] = []
    nodes: list[NodeProto] = []
    changed = _own_statistics(graph)
    for node in graph.nodes:
        new = [node]
        if node.op_type == "BatchNormalization" and is_standard(node.domain):
            new = _batch_normalization(graph, node, options.mode, training, refusals)
        elif node.op_type == "Dropout" and is_standard(node.domain):
            new = [_dropout(graph, node, options.mode)]
        changed = changed or new != [node] or new[0] is not node
        nodes += new
    if refusals:
        raise UnsupportedError(f"{len(refusals)} nodes can't be put in training mode:", refusals)
    if changed:
        graph.set_nodes(nodes)
    if options.mode != "keep":
        texts = [
            *(_without_effect(graph, training) if options.mode == "train" else ()),
            *_in_bodies(graph, options.mode),
        ]
        training.cautions.extend(Caution("note", "`mode`", text) for text in texts)
    return changed


def _own_statistics(graph: Graph) -> bool:
    """Make running statistics that are Identity of a weight initializers of their own.

    PyTorch's older exporter writes equal tensors once, so that a fresh network's running variance is an Identity of
    its scale, both being ones: followed to the letter, the weight would get the statistic's gradient too.
    """
    read = {name for node in graph.nodes if node.op_type == "BatchNormalization" for name in list(node.input)[3:5]}
    if not read:
        return False
    kept = []
    for node in graph.nodes:
        tensor = (
            graph.initializers.get(node.input[0]) if node.op_type == "Identity" and node.output[0] in read else None
        )
        if tensor is None or is_external(tensor) or node.output[0] in graph.output_names:
            kept.append(node)
            continue
        copy = graph.proto.graph.initializer.add()
        copy.CopyFrom(tensor)
        copy.name = node.output[0]
        graph.initializers[copy.name] = copy
    changed = len(kept) < len(graph.nodes)
    graph.nodes = kept
    return changed


def _without_effect(graph: Graph, training: ModeRecord) -> list[str]:
    kinds = {node.op_type for node in graph.nodes}
    cautions = []
    if "Dropout" not in kinds:
        cautions.append("`mode='train'`: the model has no Dropout; exporters take it out of a model in inference mode")
    if not training.state:
        cautions.append(
            "`mode='train'`: the model has no BatchNormalization; exporters fold it into the convolution before it"
        )
    return cautions


def _in_bodies(graph: Graph, mode: str) -> list[str]:
    inner = {n.op_type for node in graph.nodes for body in subgraphs(node) for n in with_bodies(body.node)}
    found = sorted(inner & {"Dropout", "BatchNormalization"})
    return [f"`mode={mode!r}`: a {kind} inside a subgraph stays as it is" for kind in found]


def _attribute(node: NodeProto, name: str, default: float) -> float:
    found = next((a for a in node.attribute if a.name == name), None)
    return default if found is None else onnx.helper.get_attribute_value(found)


def _dropout(graph: Graph, node: NodeProto, mode: str) -> NodeProto:
    has_switch = len(node.input) > 2 and bool(node.input[2])
    switch = graph.constant(node.input[2]) if has_switch else np.array(False)
    new = NodeProto()
    new.CopyFrom(node)
    if mode == "eval":
        if not has_switch:
            return node
        del new.input[1:]
        return new
    if mode == "keep":
        if (switch is not None and not switch) or (len(node.output) > 1 and node.output[1]):
            return node
    else:
        name = "dropout_training_mode"
        if name not in graph.initializers:
            name = graph.fresh(name)
            graph.add_initializer(name, np.array(True))
        new.input.extend([""] * (3 - len(new.input)))
        new.input[2] = name
    if len(new.output) < 2 or not new.output[1]:
        del new.output[1:]
        new.output.append(graph.fresh(f"{node.output[0]}_mask"))
    return new


def _batch_normalization(
    graph: Graph, node: NodeProto, mode: str, training: ModeRecord, refusals: list[Refusal]
) -> list[NodeProto]:
    extra = [name for name in node.output[1:] if name]
    trains = bool(_attribute(node, "training_mode", 0)) or ((graph.opset() or 0) < 14 and bool(extra))
    if mode == "train" or (mode == "keep" and trains):
        if shape_of(graph.types.get(node.input[0])) is None:
            refusals.append(Refusal(node.name, node.op_type, f"the rank of '{node.input[0]}' is unknown"))
            return [node]
        return _with_batch_statistics(graph, node, training)
    if not trains:
        return [node]
    new = NodeProto()
    new.CopyFrom(node)
    del new.output[1:]
    kept = [a for a in node.attribute if a.name != "training_mode"]
    del new.attribute[:]
    new.attribute.extend(kept)
    same = zip(node.output[1:3], node.input[3:5], strict=False)
    return [new, *(_identity(graph, source, target, new.name) for target, source in same if target)]


def _identity(graph: Graph, source: str, target: str, scope: str) -> NodeProto:
    return onnx.helper.make_node("Identity", [source], [target], name=graph.fresh(f"{scope}/Identity"))


def _with_batch_statistics(graph: Graph, node: NodeProto, training: ModeRecord) -> list[NodeProto]:
    """y = (x - mean) scale / sqrt(var + epsilon) + b with the statistics of the batch, and the next running ones."""
    op = Op(graph)
    op.forward = node.name
    x, scale, b = (op.val(name) for name in node.input[:3])
    axes = [axis for axis in range(x.rank) if axis != 1]
    per_channel = [-1, *[1] * (x.rank - 2)]
    work = op.wide(x)
    op.scope = f"{node.name}/batch_mean"
    mean = op.mean(work, axes)
    op.scope = f"{node.name}/batch_var"
    centred = work + -mean  # the adjoint of Sub would negate a tensor of the size of x
    var = op.mean(centred * centred, axes)
    op.scope = f"{node.name}/normalize"
    deviation = op.Sqrt(var + _attribute(node, "epsilon", EPSILON))
    factor = op.reshape(op.cast(scale, work), per_channel) / deviation
    y = op.cast(centred * factor + op.reshape(op.cast(b, work), per_channel), x)
    op.rename(y, node.output[0])
    kept = (centred.name, deviation.name, factor.name)
    training.fusions[node.output[0]] = Fusion(
        "ai.onnx::BatchNormalization", tuple(node.input[:3]), kept, through_batch_statistics
    )
    momentum = _attribute(node, "momentum", MOMENTUM)
    fed = {*graph.input_names, *graph.initializers}
    for position, statistic in ((3, mean), (4, var)):
        name = node.input[position]
        asked = node.output[position - 2] if len(node.output) > position - 2 else ""
        if name not in fed and not asked:
            continue
        op.scope = f"{node.name}/running_{'mean' if position == 3 else 'var'}"
        running = op.val(training.state.get(name, name))
        fresh = op.cast(op.Reshape(statistic, op.ints([-1])), running)
        after = running * momentum + fresh * (1 - momentum)
        after = op.rename(after, asked or graph.fresh(f"{name}_next"))
        if name in fed:
            training.state[name] = after.name
    return op.nodes
