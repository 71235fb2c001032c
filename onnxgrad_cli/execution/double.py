"""A model in float64, also where onnxruntime has no kernels for that: those operators run on onnx.reference.

Many activations have float32 kernels alone, so a network is cut at them: what lies between runs on onnxruntime, a piece
at a time. Convolutions are written as products, and averages over windows as sums.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import groupby
from threading import Lock
from typing import Any, ClassVar

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, helper, numpy_helper

from onnxgrad_cli.execution import session
from onnxgrad_cli.execution.executor import to_double, values_of_inputs
from onnxgrad_cli.execution.limits import limited, run_limited
from onnxgrad_cli.execution.unfolding import FIRST_OPSET, unfold_windows
from onnxgrad_cli.ir.domains import is_standard, plain_domain
from onnxgrad_cli.ir.node import messages
from onnxgrad_cli.ir.nodes import reads, with_bodies
from onnxgrad_cli.ir.types import FLOATS, Arrays, dtype_of

SHARED = 1 << 20
"""Bytes from which the float64 copy of an array is made for one piece of one run, in memory that the next one uses."""

PIECE = 64 << 20
"""Bytes of such copies in one piece, from which on the next one begins."""


class Deferred:
    """An array of float64 that is made when a piece of a model reads it, so that few are there at the same time.

    Args:
        shape: its shape.
        fill: writes the entries into an array of that shape.
    """

    def __init__(self, shape: tuple[int, ...], fill: Callable[[np.ndarray], object]) -> None:
        self.shape, self.fill = shape, fill
        self.nbytes = 8 * math.prod(shape)

    @classmethod
    def copy(cls, x: np.ndarray) -> Deferred:
        """Return the entries of another array."""
        return cls(x.shape, partial(np.copyto, src=x, casting="unsafe"))


class _Buffers:
    """Memory for deferred arrays, kept between pieces and runs: the system takes long to hand out new memory."""

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray]] = defaultdict(list)

    def made(self, value: Deferred) -> np.ndarray:
        """Return a deferred array."""
        try:
            array = self._free[value.nbytes].pop().reshape(value.shape)
        except IndexError:
            array = np.empty(value.shape)
        value.fill(array)
        return array

    def give_back(self, arrays: Iterable[np.ndarray]) -> None:
        """Keep the memory of arrays that are not used any more."""
        for array in arrays:
            self._free[array.nbytes].append(array.reshape(-1))


class DoubleExecutor:
    """Runs a model in float64: what float kernels alone can compute on onnx.reference, the rest on onnxruntime.

    Args:
        model: the model, in whatever floats; not changed.
        beside: whether it also runs twice at the same time: then threads without work leave the processor to others.
        large: the bytes in float64 of inputs that are fed deferred.

    Raises:
        Exception: neither can run it, which shows at the first run.
    """

    _single: ClassVar[set[tuple[str, str]]] = {("", "Shrink")}
    """Operators that have turned out to have no float64 kernel on onnxruntime, by domain; for good, in this process.

    The kernel of Shrink takes float64 and computes in float32.
    """

    def __init__(self, model: ModelProto, beside: bool = False, large: Mapping[str, int] | None = None) -> None:
        bare, self._fed = session.take_out(model, values_of_inputs(model, FLOATS), None)
        self._large = {**(large or {}), **{name: 8 * x.size for name, x in self._fed.items() if 8 * x.size >= SHARED}}
        self._buffers = _Buffers()
        self._model = to_double(bare)
        unfolded = unfold_windows(self._model)
        old = any(is_standard(each.domain) and each.version < FIRST_OPSET for each in self._model.opset_import)
        self._newer = unfolded if old else set()
        graph = self._model.graph
        self.inputs = {value.name: dtype_of(value.type) for value in graph.input}
        self._stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
        self._outputs = [value.name for value in graph.output]
        self._beside = beside
        self._readers = Counter(name for node in graph.node for name in set(reads(node)))
        parts = filter(None, self._parts(graph.node))
        pieces = [_Piece(self._model, nodes, self._outputs, self._readers, beside) for nodes in parts]
        self._pieces = [
            part
            for piece in pieces
            for part in (self._split(piece, trusted=True) if any(map(self._is_apart, piece.nodes)) else [piece])
        ]

    @property
    def name(self) -> str:
        """What has run it so far."""
        runtime = f"onnxruntime {session.load_onnxruntime().__version__}"
        by_reference = [piece.by_reference for piece in self._pieces]
        if all(by_reference):
            return "onnx.reference"
        return f"{runtime} and onnx.reference" if any(by_reference) else runtime

    def _parts(self, nodes: Sequence[NodeProto]) -> list[list[NodeProto]]:
        """Return the nodes in parts that read about `PIECE` bytes of large inputs each."""
        parts: list[list[NodeProto]] = [[]]
        taken = set[str]()
        for node in nodes:
            more = self._large.keys() & set(reads(node)) - taken
            if taken and more and sum(map(self._large.__getitem__, taken | more)) > PIECE:
                parts.append([])
                taken = set()
            taken |= more
            parts[-1].append(node)
        return parts

    def widened(self, feeds: Mapping[str, np.ndarray]) -> Arrays:
        """Feeds for it: of those for the model, the ones that it takes, floats in float64."""
        return {name: widened(x) for name, x in feeds.items() if name in self.inputs}

    def __call__(self, feeds: Mapping[str, np.ndarray | Deferred]) -> Arrays:
        """Return the model's outputs by name. Inputs that are not fed have their stored values."""
        values: dict[str, Any] = {**self._stored, **{n: x for n, x in self._fed.items() if n not in feeds}, **feeds}
        for name in self._fed.keys() - feeds.keys():
            values[name] = Deferred.copy(values[name]) if name in self._large else widened(values[name])
        at, pieces = 0, self._pieces  # never changed, as there may be runs at the same time
        last = self._last_reads(pieces)
        while at < len(pieces):
            try:
                values |= pieces[at](values, self._buffers)
            except _NoKernel as error:
                self._single.update(error.operators)
                self._pieces = pieces = [*pieces[:at], *self._split(pieces[at]), *pieces[at + 1 :]]
                last = self._last_reads(pieces)
                continue
            at += 1
            for name in last.get(at, ()):
                values.pop(name, None)
        return {name: values[name] for name in self._outputs}

    def _split(self, piece: _Piece, trusted: bool = False) -> Iterator[_Piece]:
        """Yield the parts of a piece, cut where an operator has no kernel and where nodes need a newer opset.

        If no operator is known to lack a kernel, onnx.reference runs all of them, unless they are `trusted`.
        """
        trusted = trusted or any(map(self._is_single, piece.nodes))
        for (single, newer), nodes in groupby(piece.nodes, self._kind):
            by_reference, opset = single or not trusted, FIRST_OPSET if newer else None
            yield _Piece(self._model, list(nodes), self._outputs, self._readers, self._beside, by_reference, opset)

    def _kind(self, node: NodeProto) -> tuple[bool, bool]:
        """Return whether a node lacks a kernel, and whether it needs a newer opset than the model's."""
        return self._is_single(node), not self._newer.isdisjoint(node.output)

    def _is_apart(self, node: NodeProto) -> bool:
        """Return True if a node does not run with the others."""
        return any(self._kind(node))

    def _is_single(self, node: NodeProto) -> bool:
        """Return True if a node, or one in its bodies, has no kernel that computes all of it in float64.

        The kernel of LayerNormalization gives the mean and the deviation in float32.
        """
        nodes = list(with_bodies([node]))
        stashes = any(inner.op_type == "LayerNormalization" and any(inner.output[1:]) for inner in nodes)
        return stashes or not self._single.isdisjoint((inner.domain, inner.op_type) for inner in nodes)

    def _last_reads(self, pieces: Sequence[_Piece]) -> dict[int, list[str]]:
        """The values that nobody reads any more after so many pieces; those in between would fill the memory."""
        last: dict[str, int] = {}
        for position, piece in enumerate(pieces, 1):
            last.update(dict.fromkeys(piece.inputs, position))
        gone: dict[int, list[str]] = {}
        for name, position in last.items():
            if name not in self._outputs:
                gone.setdefault(position, []).append(name)
        return gone


def is_wide(x: np.ndarray) -> bool:
    """Return True if a run in float64 takes an array of this type in float64."""
    return x.dtype.kind not in "iubOSUc"


def widened(x: np.ndarray) -> np.ndarray:
    """An array in float64 if it holds floats; else as it is."""
    return np.asarray(x, np.float64) if is_wide(x) else x


class _NoKernel(Exception):
    """onnxruntime has no float64 kernel for `operators`, by domain."""

    def __init__(self, operators: set[tuple[str, str]]) -> None:
        super().__init__("no float64 kernel")
        self.operators = operators


class _Piece:
    """Some nodes of a model that run together; how, is decided at the first run, when the types are known."""

    def __init__(
        self,
        model: ModelProto,
        nodes: list[NodeProto],
        outputs: Sequence[str],
        readers: Mapping[str, int],
        beside: bool,
        by_reference: bool = False,
        opset: int | None = None,
    ) -> None:
        self.nodes, self.by_reference, self._beside = nodes, by_reference, beside
        self._model, self._opset = model, opset
        made = {name for node in nodes for name in node.output if name}
        own = Counter(name for node in nodes for name in set(reads(node)))
        self.inputs = sorted(own.keys() - made)
        self.outputs = sorted(name for name in made if name in outputs or readers[name] > own[name])
        self._run: Callable[..., Any] | None = None
        self._alone = Lock() if by_reference else nullcontext()  # its evaluators keep what they run in themselves

    def __call__(self, values: Mapping[str, Any], buffers: _Buffers) -> Arrays:
        """Return the outputs of this piece.

        Raises:
            _NoKernel: onnxruntime has none for one of its operators.
        """
        made = {name: buffers.made(values[name]) for name in self.inputs if isinstance(values[name], Deferred)}
        feeds = {name: made[name] if name in made else _array(values[name]) for name in self.inputs}
        errors = session.load_onnxruntime().capi.onnxruntime_pybind11_state
        try:  # some kernels refuse float64 only when they run
            if self._run is None:
                self._run = self._opened(feeds)
            options = None if self.by_reference else session.load_onnxruntime().RunOptions
            with self._alone:
                return dict(zip(self.outputs, run_limited(self._run, feeds, options), strict=True))
        except (errors.NotImplemented, errors.RuntimeException, errors.InvalidGraph) as error:
            if isinstance(error, errors.InvalidGraph) and "Type Error" not in str(error):
                raise
            raise _NoKernel(_without_kernel(str(error), self._model, self.nodes)) from error
        finally:
            buffers.give_back(made.values())

    def _opened(self, feeds: Arrays) -> Callable[..., Any]:
        types = {name: x.dtype for name, x in feeds.items()}
        model = _as_model(self.nodes, types, self.outputs, self._model, self._opset)
        if self.by_reference:
            from onnxgrad_cli.execution.reference import evaluator  # its import takes longer than a small build

            return evaluator(model).run
        few = session.OPTIMIZED_FOR_FEW_RUNS
        with limited():
            return session.start_session(model, alternating=True, beside=self._beside, optimized=few, arena=False).run


def _array(x: Any) -> Any:
    """A value as onnxruntime takes it: numpy makes numbers of arrays without axes, and sequences are lists."""
    return np.asarray(x) if isinstance(x, np.generic) else x


def _as_model(
    nodes: Sequence[NodeProto],
    inputs: Mapping[str, np.dtype[Any]],
    outputs: Sequence[str],
    like: ModelProto,
    opset: int | None = None,
) -> ModelProto:
    """Some nodes of a model as one of its own, at another opset if one is given; nothing is said of shapes."""
    graph = helper.make_graph(
        nodes,
        "piece",
        [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(t), None) for n, t in inputs.items()],
        [onnx.ValueInfoProto(name=name) for name in outputs],
    )
    model = helper.make_model(graph, opset_imports=like.opset_import, functions=like.functions)
    model.ir_version = like.ir_version
    for entry in model.opset_import:
        if opset is not None and is_standard(entry.domain):
            entry.version = opset
    return model


def _without_kernel(text: str, model: ModelProto, nodes: Sequence[NodeProto]) -> set[tuple[str, str]]:
    """The operators of nodes that lack a kernel, by what onnxruntime's refusal says.

    It names the operator or, for one that onnxruntime writes out by a function, an operator of that function. Functions
    that depend on types can't be looked into here: their operators are tried one by one where no other fits.
    """
    found = re.search(r"implementation for (?:\S+[.:])?(\w+)\(|running (\w+) node|of operator \((\w+)\)", text)
    named = next(filter(None, found.groups()), "") if found else ""
    there = {(node.domain, node.op_type) for node in with_bodies(nodes)}
    direct = {operator for operator in there if operator[1] == named}
    if direct:
        return direct
    bodies = {operator: _body(operator, model) for operator in there}
    through = {operator for operator, body in bodies.items() if body is not None and named in body}
    suspects = {operator for operator, body in bodies.items() if body == frozenset()}
    return through or {operator for operator in suspects if not _opens(operator, nodes, model)}


def _opens(operator: tuple[str, str], nodes: Sequence[NodeProto], model: ModelProto) -> bool:
    """Whether onnxruntime opens a node of an operator alone, all of its inputs in float64."""
    node = next(node for node in with_bodies(nodes) if (node.domain, node.op_type) == operator)
    inputs = {name: np.dtype(np.float64) for name in node.input if name}
    try:
        session.start_session(_as_model(messages([node]), inputs, list(filter(None, node.output)), model))
    except Exception:  # of many kinds, none of them public
        return False
    return True


def _body(operator: tuple[str, str], model: ModelProto) -> frozenset[str] | None:
    """The operators of the function that defines one; empty where they depend on types, None where there is none."""
    for function in model.functions:
        if (function.domain, function.name) == operator:
            return frozenset(node.op_type for node in function.node)
    domain, name = operator
    version = next((entry.version for entry in model.opset_import if entry.domain == domain), 1)
    try:
        schema: Any = onnx.defs.get_schema(name, version, plain_domain(domain))
    except onnx.defs.SchemaError:
        return None
    if schema.has_function:
        return frozenset(node.op_type for node in schema.function_body.node)
    return frozenset() if schema.has_context_dependent_function else None
