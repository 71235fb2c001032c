"""Which float tensors of a model are weights to be trained, and which are constants by the role they play.

A file does not say which of its initializers were parameters, so the choice follows from where each is read.
Every decision is recorded with its reason; `--train`, `--preset` and `--train-last` narrow it, and `--freeze` overrides
them.
"""

from __future__ import annotations

import functools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase

import numpy as np
from onnx import NodeProto, numpy_helper

from onnxgrad_cli.autodiff import registry
from onnxgrad_cli.autodiff.reverse import open_reads
from onnxgrad_cli.errors import Caution, UnsupportedError, UsageError, suggest
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.nodes import reads, subgraphs, with_bodies
from onnxgrad_cli.ir.types import SMALL, is_differentiable, is_external, is_float, nbytes
from onnxgrad_cli.options import SelectionOptions
from onnxgrad_cli.passes.parameters import presets
from onnxgrad_cli.record import SelectionRecord

SETTINGS: dict[tuple[str, int], str] = {
    ("BatchNormalization", 3): "running mean of a BatchNormalization",
    ("BatchNormalization", 4): "running variance of a BatchNormalization",
    ("Clip", 1): "bound of a Clip",
    ("Clip", 2): "bound of a Clip",
    ("Dropout", 1): "ratio of a Dropout",
    ("Pad", 2): "fill value of a Pad",
    ("Resize", 1): "region of a Resize",
    ("Resize", 2): "scales of a Resize",
    ("Upsample", 1): "scales of an Upsample",
    ("OneHot", 2): "values of a OneHot",
    ("QuantizeLinear", 1): "quantization scale",
    ("DequantizeLinear", 1): "quantization scale",
    **{(op, i): "quantization scale" for op in ("QLinearConv", "QLinearMatMul") for i in (1, 4, 6)},
    ("LSTM", 5): "initial state",
    ("LSTM", 6): "initial state",
    ("GRU", 5): "initial state",
    ("RNN", 5): "initial state",
}
"""Operand positions that hold a setting, never a parameter."""

SCALAR_FACTORS = frozenset("Add Sub Mul Div Pow Max Min Where Mod Equal Greater Less Expand".split())
"""Operators whose one-element operands are plain constants: epsilons, scales, exponents, bounds."""

PRODUCTS = frozenset("MatMul Gemm Conv ConvTranspose Einsum".split())
GENERATED = re.compile(r"^(val_\d+|onnx::.*|.*Constant(_\d+)?(_output_0)?)$")


def select(graph: Graph, options: SelectionOptions, training: SelectionRecord) -> None:
    """Fill `training.trained`, `.not_trained` and `.grad_of_input`, in the order of the model's initializers.

    With adapters, what would be trained without them and is not chosen by name goes to `training.adaptable`.

    Raises:
        UsageError: a pattern or a preset names nothing, or a chosen tensor is not tied to the loss.
        UnsupportedError: nothing is left to differentiate with respect to.
    """
    floats = [n for n in graph.initializers if is_float(graph.types[n]) and not graph.added(n)]
    tied = _tied(graph, training.predictions)
    asked = matching(options.train, floats, "`train`", "float weights")
    frozen = matching(options.freeze, floats, "`freeze`", "float weights")
    inputs = [name for name in training.inputs if is_float(graph.types.get(name))]
    training.grad_of_input = matching(options.grad_of_input, inputs, "`grad_of_input`", "float inputs")
    unfit = _unfit(graph, training, floats, tied, asked)
    fit = [name for name in floats if name not in unfit and name not in frozen]
    chosen = {*asked, *presets.chosen(graph, options, training.predictions, fit)}
    choices = _choices(options)
    for name in floats:
        if name in frozen:
            reason = "frozen by --freeze"
        elif choices and name not in chosen and not options.lora:
            reason = f"not named by {choices}"
        else:
            reason = unfit.get(name, "")
        if options.lora and not reason and name not in chosen:
            training.adaptable.append(name)
            reason = "frozen: adapters are trained instead"
        if reason:
            training.not_trained[name] = reason
        else:
            training.trained.append(name)
    for name in asked:
        if name not in tied and name not in frozen:
            raise UsageError(f"`train`: no differentiable path ties '{name}' to {_listed(training.predictions)}")
    training.cautions.extend(_merged(graph, set(training.trained)))
    for node in graph.nodes:
        if node.op_type == "DequantizeLinear" and node.input[0] in graph.initializers:
            training.not_trained[node.input[0]] = "quantized: integers have no gradient"
    if not training.trained and not training.adaptable and not training.grad_of_input:
        raise _nothing(graph, floats, training)


def _unfit(
    graph: Graph, training: SelectionRecord, floats: list[str], tied: set[str], asked: list[str]
) -> dict[str, str]:
    """Those of `floats` that can't be trained, or have not been asked for and are constants by role, and why."""
    reached = _tied(graph, training.predictions, reads) if any(registry.all_stopped()) else tied
    roles = _Roles(graph)
    reasons: dict[str, str] = {}
    for name in floats:
        if name in training.state:
            reasons[name] = f"a running statistic: '{training.state[name]}' is its next value"
        elif name not in tied and name in reached:
            reasons[name] = "gradients stop at the operands through which it reaches the loss"
        elif name not in tied:
            reasons[name] = "no differentiable path ties it to the loss"
        elif name not in asked:
            reasons[name] = roles.constant(name)
    return {name: reason for name, reason in reasons.items() if reason}


def _choices(options: SelectionOptions) -> str:
    """The options that name what is trained, in words; "" where all is."""
    names = ["--train"] if options.train else []
    names += [f"--preset {name}" for name in options.preset]
    names += [f"--train-last {options.train_last}"] if options.train_last else []
    return " or ".join(names)


def _merged(graph: Graph, trained: set[str]) -> Iterator[Caution]:
    """Weights under several names: an exporter has written equal ones once, and they will be trained as one."""
    names: dict[str, list[str]] = defaultdict(list)
    for node in graph.nodes:
        if node.op_type == "Identity" and node.input[0] in trained:
            names[node.input[0]].append(node.output[0])
    for name, others in names.items():
        text = (
            f"'{name}' is also called {_listed(others[:3])}{' and more' if len(others) > 3 else ''}: trained as one "
            "weight. PyTorch's older exporter merges weights of equal values; if they are to be trained apart, export "
            "without that"
        )
        yield Caution("note", name, text)


def _nothing(graph: Graph, floats: list[str], training: SelectionRecord) -> UnsupportedError:
    if not floats:
        return UnsupportedError(
            "the model has no float initializer: there is nothing to train",
            hint="gradients of its float inputs can be had with `grad_of_input='*'`",
        )
    reasons = "\n".join(f"  {name}: {reason}" for name, reason in list(training.not_trained.items())[:20])
    return UnsupportedError(f"no weight is left to train:\n{reasons}", hint="choose weights with `train=GLOB`")


def _listed(names: list[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def matching(patterns: str | Sequence[str], names: list[str], option: str, kind: str) -> list[str]:
    """Those of `names` that are one of `patterns` or match one, in their order.

    Raises:
        UsageError: a pattern matches none; `option` and `kind`, in the plural, say what was asked for.
    """
    found: list[str] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        hits = [name for name in names if name == pattern or fnmatchcase(name, pattern)]
        if not hits:
            raise UsageError(f"{option}: '{pattern}' matches no {kind[:-1]}", suggest(pattern, names, kind))
        found += hits
    return [name for name in names if name in set(found)]


def _tied(graph: Graph, outputs: list[str], read: Callable[[NodeProto], list[str]] = open_reads) -> set[str]:
    """Every value that a path ties to `outputs`, through operators with a derivative or one that is refused.

    Where floats become integers the path ends, unless they were quantized.
    """
    tied = set(outputs)
    opsets = {entry.domain or "": entry.version for entry in graph.proto.opset_import}
    lookup = functools.cache(lambda op_type, domain: registry.lookup(op_type, domain, opsets.get(domain or "", 1)))
    for node in reversed(graph.nodes):
        made = node.output[:]
        if not tied.isdisjoint(made):
            rule = lookup(node.op_type, node.domain)
            if rule is not None and rule.is_zero:
                continue
            through = rule is None or rule.integers or any([n in tied and _may_be_float(graph, n) for n in made])
            names = read(node)
            tied.update(names if through else [n for n in names if not _may_be_float(graph, n)])
    return tied


def _may_be_float(graph: Graph, name: str) -> bool:
    return name not in graph.types or is_differentiable(graph.types[name])


def _within(name: str, node: NodeProto, position: int) -> list[tuple[NodeProto, int]]:
    """The nodes that read a value, and at which input; of a node that captures it, those in its bodies."""
    if position >= 0:
        return [(node, position)]
    inner = [each for body in subgraphs(node) for each in with_bodies(body.node)]
    return [(each, at) for each in inner for at, read in enumerate(each.input) if read == name]


class _Roles:
    """The role each initializer plays, by where it is read."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.uses = graph.uses()
        self.producers = graph.producers()

    def constant(self, name: str) -> str:
        """Why `name` is a constant by role, or "" where it is a weight."""
        reasons = [self._at(name, *use) for each in self.uses[name] for use in _within(name, *each)]
        return reasons[0] if reasons and all(reasons) else ""

    def _at(self, name: str, node: NodeProto, position: int) -> str:
        op_type = node.op_type
        if (op_type, position) in SETTINGS:
            return SETTINGS[op_type, position]
        tensor = self.graph.initializers[name]
        size = math.prod(tensor.dims)
        if not tensor.dims and op_type != "PRelu":
            return f"a scalar constant of {op_type} (name it with --train to train it)"
        if size == 1 and op_type in SCALAR_FACTORS and not self._is_bias(node, position):
            return f"a one-element constant of {op_type} (name it with --train to train it)"
        if op_type in ("Mul", "Div") and self._is_frequency(node):
            return "a table of frequencies before Sin or Cos (name it with --train to train it)"
        if op_type == "InstanceNormalization" and GENERATED.match(name) and self._is_identity(name, position):
            return "the identity scale or shift of an InstanceNormalization without parameters"
        return ""

    def _is_bias(self, node: NodeProto, position: int) -> bool:
        """Whether a one-element operand of Add or Sub is the bias of the matrix product before it."""
        if node.op_type not in ("Add", "Sub"):
            return False
        other = self.producers.get(node.input[1 - position])
        return other is not None and other.op_type in PRODUCTS

    def _is_frequency(self, node: NodeProto, depth: int = 3) -> bool:
        """Whether the product goes straight to Sin or Cos, but for constant factors and views."""
        for reader, _ in self.uses.get(node.output[0], ()):
            if reader.op_type in ("Sin", "Cos"):
                return True
            views = ("Mul", "Concat", "Unsqueeze", "Reshape", "Slice", "Transpose")
            if depth and reader.op_type in views and self._is_frequency(reader, depth - 1):
                return True
        return False

    def _is_identity(self, name: str, position: int) -> bool:
        tensor = self.graph.initializers[name]
        if is_external(tensor) or nbytes(tensor) > 64 * SMALL:
            return False
        return bool(np.all(numpy_helper.to_array(tensor) == (1.0 if position == 1 else 0.0)))
