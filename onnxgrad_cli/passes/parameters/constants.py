"""Recognize float initializers that are constants by their role: settings, epsilons, scales, tables of frequencies.

A file does not say which initializers were parameters, unless PyTorch's newer exporter wrote it. For other files, the
role of a tensor is inferred from the operators that read it, and from its values if they follow a formula. If neither
decides, the role is inferred from the name.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

import numpy as np
from onnx import TensorProto, numpy_helper

from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.node_values import subgraphs, with_bodies
from onnxgrad_cli.ir.types import FLOATS, MAX_SHAPE_BYTES, NARROW, is_external, nbytes
from onnxgrad_cli.passes.parameters import formulas
from onnxgrad_cli.passes.parameters.frequencies import PRODUCTS, Frequencies
from onnxgrad_cli.passes.parameters.presets import BIASES, NORMALIZATIONS, VIEWS
from onnxgrad_cli.passes.stored_integers import QUANTIZERS

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
    ("GridSample", 1): "grid of a GridSample",
    ("CropAndResize", 1): "boxes of a CropAndResize",
    ("STFT", 2): "window of an STFT",
    ("QuantizeLinear", 1): "quantization scale",
    ("DequantizeLinear", 1): "quantization scale",
    ("MatMulBnb4", 2): "quantization scale",
    ("MatMulNBits", 2): "quantization scale",
    ("GatherBlockQuantized", 2): "quantization scale",
    **{(op, i): "quantization scale" for op in ("QLinearConv", "QLinearMatMul") for i in (1, 4, 6)},
    **{("RotaryEmbedding", i): "rotary cache" for i in (1, 2, 3)},
    **{("MRotaryEmbedding", i): "rotary cache" for i in (2, 3)},
    **{("GroupQueryAttention", i): "rotary cache" for i in (7, 8)},
}
"""Map from an operand, as (operator, position), that is a setting and never a parameter, to a description of it."""

RESIZERS = frozenset({"Resize", "Upsample"})
"""Operators whose operands, except the first, determine how they resize."""

STATES = frozenset({("LSTM", 5), ("LSTM", 6), ("GRU", 5), ("RNN", 5)})
"""Operands, as (operator, position), that are the initial state of a recurrent layer: zeros, unless it was learned."""

SCALAR_FACTORS = frozenset("Add Sub Mul Div Pow Max Min Where Mod Equal Greater Less Expand".split())
"""Operators whose one-element operands are normally constants: epsilons, scales, exponents, bounds."""

LEARNED = frozenset("Exp Sigmoid Softplus Tanh".split())
"""Functions that bound a learned scalar. Exporters would have folded the function of a constant scalar."""

LIMITS = frozenset("Max Min Where Mod Equal Greater Less Expand Clip".split())
"""Operators whose operands are not parameters, even if they have the name of a parameter."""

WEIGHTS = BIASES | {
    *((op_type, 1) for op_type in NORMALIZATIONS),
    *((op, i) for op in ("LSTM", "GRU", "RNN") for i in (1, 2)),
    ("PRelu", 1),
}
"""Operands, as (operator, position), that are parameters, whatever their values are."""

TABLES = frozenset({"Gather", "GatherElements", "GatherND"})
PASSED = VIEWS | TABLES | QUANTIZERS | {"Concat", "Slice", "Tile"}
"""Operators that pass values on: a node that reads their output counts as a reader of their input."""

GENERATED = re.compile(
    r"^((val|lifted_tensor|_tensor_constant|clone|scalar_tensor_default)_?\d*|onnx(::|__).*|.*Constant(_\d+)?(_output_0)?|\d+)$"
)
"""Pattern of names that PyTorch's exporters generate for values that have no name in the program."""

MEMBER = re.compile(r"^[A-Za-z_]\w*(\.\w+)*$")
"""Pattern of names that PyTorch's older exporter gives only to parameters and buffers (members of modules)."""

PAIRED = 64
"""Largest number of tensors of one shape among which pairs of cosines and sines are searched."""

MANY_VECTORS = 32
"""Smallest number of vectors of one length that are tested together first. Fewer are tested one by one."""

KEPT = 4096
"""Largest number of elements of a tensor whose values are cached."""

BY_NAME = "(name it with `train` to train it)"


def _within(name: str, node: Node, position: int) -> list[tuple[Node, int]]:
    """Return the nodes that read the value `name` as an input, each with the position of this input.

    This is `node` itself, unless `position` is negative: then bodies of `node` capture the value, and the nodes of the
    bodies that read it are returned.
    """
    if position >= 0:
        return [(node, position)]
    inner = [each for body in subgraphs(node) for each in with_bodies(body.node)]
    return [(each, at) for each in inner for at, read in enumerate(each.input) if read == name]


def settings(graph: Graph) -> dict[str, str]:
    """Return a map: value that is read only as a setting -> its description, such as 'bound of a Clip'.

    Must be called before operators are replaced.
    """
    found = {name: setting for name, uses in graph.uses().items() if (setting := _setting(uses))}
    return dict.fromkeys(resizing(graph), SETTINGS["Resize", 2]) | found


def resizing(graph: Graph) -> set[str]:
    """Return the values used only to determine how Resize or Upsample resizes, directly or through other values."""
    if not any(node.op_type in RESIZERS for node in graph.nodes):
        return set()
    found, makers, uses = set[str](), set[int](), graph.uses()

    def is_setting(name: str) -> bool:
        read = [use for each in uses.get(name, ()) for use in _within(name, *each)]
        return bool(read) and all(
            at > 0 if node.op_type in RESIZERS else at >= 0 and id(node) in makers for node, at in read
        )

    outputs = set(graph.output_names)
    for node in reversed(graph.nodes):
        if outputs.isdisjoint(node.output) and all(is_setting(name) for name in node.output if name):
            makers.add(id(node))
            found.update(node.output)
    return found | {name for name in uses if is_setting(name)}


def _setting(uses: Iterable[tuple[Node, int]]) -> str:
    """Return a description of the setting that a tensor is, or "" unless all its uses are settings."""
    found = [SETTINGS.get((node.op_type, position), "") for node, position in uses]
    return found[0] if found and all(found) else ""


def _tests(reached: list[tuple[Node, int]]) -> formulas.Tests:
    """Return the tests for constants to apply to a tensor, given the nodes that read it; see `formulas`."""
    tests = formulas.ANYWHERE
    products = {(node.op_type, position) for node, position in reached if node.op_type in PRODUCTS}
    if reached and not any(position > 0 or op_type == "Einsum" for op_type, position in products):
        tests += formulas.ELEMENTWISE
    if products:
        tests += formulas.MULTIPLIED
    return tests


class Decision(NamedTuple):
    """A decision on the role of a tensor: constant or parameter.

    Attributes:
        heuristic: identifier of the heuristic that decided. Identifiers never change, so that decisions can be counted.
        reason: why the tensor is a constant; "" for a parameter.
    """

    heuristic: str
    reason: str = ""


class ConstantRoles:
    """Finds the role of each initializer: from statements of the file, from its readers, and from its values.

    Attributes:
        doubts: map from an examined tensor whose role is uncertain to a description for the user.
        by_values: examined tensors that are constants only by their values.
    """

    def __init__(self, graph: Graph, without: Collection[str] = ()) -> None:
        """Read the graph.

        Args:
            graph: the prepared model.
            without: identifiers of heuristics to skip, so that their effect can be measured.
        """
        self.graph = graph
        self.without = without
        self.said = graph.provenance
        self.uses = graph.uses()
        self.producers = graph.producers()
        self.doubts: dict[str, str] = {}
        self.by_values: set[str] = set()
        self._samples: dict[str, np.ndarray | None] = {}
        self._found: dict[str, list[tuple[Node, int]]] = {}
        self._quantized: set[str] = set()

    def reason(self, name: str) -> str:
        """Return the reason why `name` is a constant by its role, or "" if it is a weight."""
        return self.decide(name).reason

    def decide(self, name: str) -> Decision:
        """Return the decision of the first heuristic that decides. If none does, the tensor is a parameter."""
        uses = [use for each in self.uses[name] for use in _within(name, *each)]
        for heuristic in HEURISTICS:
            decision = heuristic(self, name, uses)
            if decision is not None and decision.heuristic not in self.without:
                return decision
        return Decision("default")

    def infinite(self, name: str) -> str:
        """Return the reason why infinite values make it useless to train `name`, even on request, or ""."""
        values = self._values(name)
        if values is None or not np.isinf(values).any():
            return ""
        if len(np.unique(values[np.isfinite(values)])) <= 1:
            return "it has infinite values, which training can't change"
        self._note_infinite(name)
        return ""

    def _note_infinite(self, name: str) -> None:
        text = (
            f"'{name}' has both infinite and finite values; training can't change the infinite ones, and weight "
            "decay would turn them into NaN"
        )
        self.doubts[name] = f"{text}. Freeze it with `freeze={name!r}`"

    def _by_setting(self, name: str, uses: list[tuple[Node, int]]) -> Decision | None:
        """Decide that the tensor is a constant if it is read only as a setting of operators."""
        setting = self.graph.settings.get(name) or _setting(uses) or _setting(self._reached(name))
        scales = [n.op_type in ("Sub", "Mul", "Div") and n.input[1 - at] in self._casted for n, at in uses]
        if not setting and uses and all(scales):  # it shifts or scales stored integers
            setting = SETTINGS["DequantizeLinear", 1]
        return Decision("setting", setting) if setting else None

    @functools.cached_property
    def _casted(self) -> set[str]:
        """The values that are computed from stored integers by a Cast to floats, then possibly views and shifts."""
        found: set[str] = set()
        for node in self.graph.nodes:
            if node.op_type == "Cast":
                stored = self.graph.initializers.get(node.input[0])
                is_casted = stored is not None and stored.data_type in NARROW
            else:
                is_casted = (node.op_type in VIEWS or node.op_type == "Sub") and node.input[0] in found
            if is_casted:
                found.update(node.output)
        return found

    def _by_exporter(self, name: str, uses: list[tuple[Node, int]]) -> Decision | None:
        """Decide as PyTorch's newer exporter recorded it: parameter or constant.

        A recorded parameter counts as a constant if it passes one of the tests in `formulas.FROZEN`.
        """
        if name in self.said.learned:
            found = self._formula(name, formulas.FROZEN)
            return self._by_test(name, found) if found else Decision("exporter")
        fixed = name in self.said.fixed
        return Decision("exporter", f"PyTorch's exporter does not mark it as a parameter {BY_NAME}") if fixed else None

    def _at(self, name: str, node: Node, position: int) -> str:
        """Return the reason why `name` is a constant for `node`, which reads it at `position`, or ""."""
        op_type = node.op_type
        if (op_type, position) in SETTINGS:
            return SETTINGS[op_type, position]
        dims = self.graph.initializers[name].dims
        if not dims and op_type != "PRelu":
            return f"a scalar constant of {op_type} {BY_NAME}"
        if math.prod(dims) == 1 and op_type in SCALAR_FACTORS and not self._is_bias(name, node, position):
            return f"a one-element constant of {op_type} {BY_NAME}"
        return ""

    def _doubt(self, name: str, text: str, trained: bool = False) -> None:
        """Record that the role of a tensor is uncertain, and how the user can choose the other role."""
        if trained:
            end = f"it is trained. If it is a constant, freeze it with `freeze={name!r}`"
        else:
            end = f"it is not trained. If it is a parameter, train it with `train={name!r}`"
        self.doubts[name] = f"'{name}' {text}: {end}"

    # -- scalars, and names -------------------------------------------------------------------------------------------

    def _by_bound(self, name: str, uses: list[tuple[Node, int]]) -> Decision | None:
        """Decide that a scalar is a parameter if an operator bounds it: an exporter would have folded a constant."""
        if not self._single(name, uses) or not self._is_member(name):
            return None
        return Decision("bounded") if any(node.op_type in LEARNED for node, _ in uses) else None

    def _by_member_name(self, name: str, uses: list[tuple[Node, int]]) -> Decision | None:
        """Decide that a scalar is a parameter if it has the name of a module's member.

        PyTorch gives such names to parameters and buffers, but not to constants in code.
        """
        values = self._values(name) if self._single(name, uses) and self._is_member(name) else None
        limit = any(node.op_type in LIMITS for node, _ in uses)
        if not self.said.by_pytorch or limit or values is None or bool(np.any(np.abs(values) >= 1e4)):
            return None
        if bool(np.all(np.abs(values - np.round(values, 6)) <= 1e-6 * np.abs(values))):
            self._doubt(name, "is a single number with the name of a module's member", trained=True)
        return Decision("member name")

    def _by_size(self, name: str, uses: list[tuple[Node, int]]) -> Decision | None:
        """Decide that a scalar is a constant if nothing indicates that it is learned."""
        reason = self._single(name, uses)
        return Decision("scalar", reason) if reason else None

    def _is_member(self, name: str) -> bool:
        return name not in self.said.literals and bool(MEMBER.match(name)) and not GENERATED.match(name)

    def _single(self, name: str, uses: list[tuple[Node, int]]) -> str:
        """Return why a scalar is a constant for its first reader; "" unless it is a constant for every reader."""
        reasons = [self._at(name, *use) for use in uses]
        return reasons[0] if reasons and all(reasons) else ""

    def _by_identity(self, name: str, uses: list[tuple[Node, int]]) -> Decision | None:
        """Decide that a scale of 1 or a shift of 0 is a constant if its normalization has no parameters."""
        reached = self._reached(name) if GENERATED.match(name) else []
        if reached and all(n.op_type == "InstanceNormalization" and self._is_identity(name, at) for n, at in reached):
            text = "the constant scale or shift of an InstanceNormalization without parameters"
            return Decision("identity", text)
        return None

    def _by_literal(self, name: str, uses: list[tuple[Node, int]]) -> Decision | None:
        """Decide that a literal in the code of a PyTorch model is a constant, if other tensors are its weights."""
        if not self.said.by_pytorch or name not in self.said.literals:
            return None
        if any(tensor.dims and other not in self.said.literals for other, tensor in self._floats()):
            return Decision("literal", f"a literal in the model's code {BY_NAME}")
        return None

    # -- by place -----------------------------------------------------------------------------------------------------

    def _by_zero_start(self, name: str, uses: list[tuple[Node, int]]) -> Decision | None:
        """Decide that the tensor is a constant if it is the initial state of a recurrent layer and all zeros."""
        reached = self._reached(name)
        if not reached or not all(self._is_start(*use) for use in reached):
            return None
        values = self._values(name)
        is_zero = values is not None and not np.any(values)
        return Decision("zero start", f"an initial state of zeros {BY_NAME}") if is_zero else None

    def _by_frequency(self, name: str, uses: list[tuple[Node, int]]) -> Decision | None:
        """Decide that a tensor is a constant if it multiplies positions or coordinates before both Sin and Cos.

        Positions and coordinates are values that no layer has computed. Learned factors occur before Sin alone (SIREN,
        Snake), or before both Sin and Cos if a layer has computed what they multiply (phases).
        """
        turns, deep = self._frequencies.turns(name)
        if len(turns) < 2 or deep:
            return None
        if not self._formula(name, formulas.PROGRESSIONS):
            self._doubt(name, "is multiplied with a value before both Sin and Cos, as fixed random frequencies are")
        return Decision("frequency", f"a table of frequencies for Sin or Cos {BY_NAME}")

    def _by_statistic(self, name: str, uses: list[tuple[Node, int]]) -> Decision | None:
        """Decide that a tensor is a constant if it is the mean or deviation by which an input is standardized."""
        reached = self._reached(name)
        if reached and all(self._standardises(node) for node, _ in reached):
            self._doubt(name, "shifts or scales an input, as statistics of the data do")
            return Decision("statistic", f"a statistic that standardises an input {BY_NAME}")
        return None

    def _reached(self, name: str) -> list[tuple[Node, int]]:
        """Return (node, input position) for each reader of a tensor, its views, its parts or its gathered elements."""
        if name not in self._found:
            self._found[name] = list(self._followed(name))
        return self._found[name]

    def _followed(self, name: str) -> Iterator[tuple[Node, int]]:
        seen, names = {name}, [name]
        while names:
            value = names.pop()
            for use in self.uses.get(value, ()):
                for node, position in _within(value, *use):
                    if node.op_type not in PASSED or (position and node.op_type != "Concat"):
                        yield node, position
                    elif use[1] >= 0 and node.output[0] not in seen:
                        if node.op_type == "QuantizeLinear":
                            self._quantized.add(name)
                        seen.add(node.output[0])
                        names.append(node.output[0])

    def _is_start(self, node: Node, position: int) -> bool:
        """Return True if `position` is the initial state of a recurrent layer, or of its first step written out."""
        if node.op_type in ("MatMul", "Gemm"):
            return position == 0 and node.input[1] in self.graph.initializers
        return (node.op_type, position) in STATES

    @functools.cached_property
    def _frequencies(self) -> Frequencies:
        return Frequencies(self.graph, self.uses)

    def _standardises(self, node: Node) -> bool:
        """Return True if a node standardizes a model input by `(x - mean) / std`, with one number per channel."""
        if node.op_type not in ("Sub", "Div", "Mul") or not self._is_vector(node.input[1]):
            return False
        if node.op_type == "Sub":
            after = self._behind_multiples(node)
            scaled = [reader.op_type in ("Div", "Mul") and self._is_vector(reader.input[1]) for reader in after]
            return self._is_raw(node.input[0]) and scaled == [True]
        before = self.producers.get(node.input[0])
        while before is not None and self._is_multiple(before):
            before = self.producers.get(before.input[0])
        return before is not None and before.op_type == "Sub" and self._is_raw(before.input[0])

    def _behind_multiples(self, node: Node) -> list[Node]:
        """Return the nodes whose first input is the output of `node`, possibly multiplied by scalars."""
        readers = [reader for reader, at in self.uses.get(node.output[0], ()) if at == 0]
        while len(readers) == 1 and self._is_multiple(readers[0]):
            readers = [reader for reader, at in self.uses.get(readers[0].output[0], ()) if at == 0]
        return readers

    def _is_vector(self, name: str) -> bool:
        tensor = self.graph.initializers.get(name)
        return tensor is not None and sum(size > 1 for size in tensor.dims) <= 1

    def _is_raw(self, name: str) -> bool:
        """Return True if a value is an input of the model, possibly viewed, sliced or multiplied by scalars."""
        node = self.producers.get(name)
        while node is not None and (node.op_type in VIEWS | {"Slice"} or self._is_multiple(node)):
            name = node.input[0]
            node = self.producers.get(name)
        return name in self.graph.input_names

    def _is_multiple(self, node: Node) -> bool:
        scale = self.graph.initializers.get(node.input[1]) if node.op_type in ("Mul", "Div") else None
        return scale is not None and math.prod(scale.dims) == 1

    def _is_bias(self, name: str, node: Node, position: int) -> bool:
        """Return True if a vector that a node adds or subtracts is the bias of a preceding matrix product."""
        if node.op_type not in ("Add", "Sub") or not self._is_vector(name):
            return False
        other = self.producers.get(node.input[1 - position])
        return other is not None and other.op_type in PRODUCTS

    # -- by values ----------------------------------------------------------------------------------------------------

    def _by_position(self, name: str, uses: list[tuple[Node, int]]) -> Decision | None:
        """Decide that a tensor is a parameter if an operator that reads it expects a parameter at that position."""
        reached = self._reached(name)
        expected = any((node.op_type, at) in WEIGHTS or self._is_bias(name, node, at) for node, at in reached)
        return Decision("parameter position") if expected else None

    def _by_quantizer(self, name: str, uses: list[tuple[Node, int]]) -> Decision | None:
        """Decide that a quantized tensor is a parameter. Its values lie on a grid whatever its role is."""
        self._reached(name)
        return Decision("quantized") if name in self._quantized else None

    def _by_values(self, name: str, uses: list[tuple[Node, int]]) -> Decision | None:
        """Decide that the tensor is a constant if its values follow a formula."""
        found = self._formula(name, _tests(self._reached(name)))
        if found is not None and found.name == formulas.WHOLE:
            self._doubt(name, "contains only whole numbers, as strides, anchors and counts do")
        return self._by_test(name, found) if found else None

    def _by_rotation(self, name: str, uses: list[tuple[Node, int]]) -> Decision | None:
        """Decide that a tensor is a constant if it and another one are cosines and sines of the same angles."""
        if name not in self._rotations:
            return None
        self.by_values.add(name)
        return Decision("rotation", f"a cosine or sine of a rotation {BY_NAME}")

    def _by_test(self, name: str, test: formulas.Test) -> Decision:
        self.by_values.add(name)
        return Decision(f"formula: {test.name}", f"{test.words} {BY_NAME}")

    def _formula(self, name: str, tests: formulas.Tests) -> formulas.Test | None:
        """Return the first of `tests` that the values of a tensor pass. Tests in `without` are skipped."""
        values = None if name in self._irregular else self._values(name)
        if values is None:
            return None
        if values.size and np.isnan(values).all():  # JAX stores NaN as the variance of no numbers
            return formulas.NOTHING
        tests = tuple(test for test in tests if f"formula: {test.name}" not in self.without)
        return formulas.first(values, self._tolerance(name), tests)

    @functools.cached_property
    def _irregular(self) -> set[str]:
        """The vectors that certainly follow no formula. Vectors of equal type and length are tested together."""
        alike: dict[tuple[int, int], list[str]] = defaultdict(list)
        for name, tensor in self._floats():
            length = math.prod(tensor.dims)
            if len(tensor.dims) == 1 and formulas.MIN_TESTED_LENGTH <= length <= KEPT and not is_external(tensor):
                alike[tensor.data_type, length].append(name)
        found: set[str] = set()
        for names in alike.values():
            if len(names) < MANY_VECTORS:
                continue
            vectors = np.stack([values for name in names if (values := self._values(name)) is not None])
            suspect = formulas.suspects(vectors, self._tolerance(names[0])).tolist()
            found.update(name for name, is_suspect in zip(names, suspect, strict=True) if not is_suspect)
        return found

    @functools.cached_property
    def _rotations(self) -> set[str]:
        """The tensors read by Mul nodes that form pairs of cosines and sines of the same angles."""
        names: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for name, tensor in self._floats():
            if math.prod(tensor.dims) > 1 and all(node.op_type == "Mul" for node, _ in self._reached(name)):
                names[tuple(tensor.dims)].append(name)
        found: set[str] = set()
        for alike in names.values():
            for one, other in itertools.combinations(alike[:PAIRED], 2):
                x, y = self._values(one), self._values(other)
                if x is not None and y is not None and formulas.is_rotation(x, y, self._tolerance(one)):
                    found |= {one, other}
        return found

    def _tolerance(self, name: str) -> float:
        return formulas.tolerance(self.graph.initializers[name])

    def _values(self, name: str) -> np.ndarray | None:
        """Return the values of a tensor (or a sample of them) for the tests, or None if they can't be read."""
        if name in self._samples:
            return self._samples[name]
        path = self.graph.path
        values = formulas.sample(self.graph.initializers[name], path.parent if path else None)
        if values is None or values.size <= KEPT:
            self._samples[name] = values
        return values

    def _is_identity(self, name: str, position: int) -> bool:
        tensor = self.graph.initializers[name]
        if is_external(tensor) or nbytes(tensor) > 64 * MAX_SHAPE_BYTES:
            return False
        return bool(np.all(numpy_helper.to_array(tensor) == (1.0 if position == 1 else 0.0)))

    def _floats(self) -> Iterator[tuple[str, TensorProto]]:
        return ((name, tensor) for name, tensor in self.graph.initializers.items() if tensor.data_type in FLOATS)


Heuristic = Callable[[ConstantRoles, str, list[tuple[Node, int]]], Decision | None]

HEURISTICS: tuple[Heuristic, ...] = (
    ConstantRoles._by_exporter,
    ConstantRoles._by_setting,
    ConstantRoles._by_bound,
    ConstantRoles._by_member_name,
    ConstantRoles._by_size,
    ConstantRoles._by_identity,
    ConstantRoles._by_literal,
    ConstantRoles._by_zero_start,
    ConstantRoles._by_frequency,
    ConstantRoles._by_statistic,
    ConstantRoles._by_position,
    ConstantRoles._by_quantizer,
    ConstantRoles._by_values,
    ConstantRoles._by_rotation,
)
"""The heuristics, in order. The first one that reaches a decision counts."""
