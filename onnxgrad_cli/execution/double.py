"""Run a model in float64. Operators without a float64 kernel in onnxruntime run on onnx.reference.

Many activations have only float32 kernels in onnxruntime. The nodes are divided into pieces (`_Piece`), which run one
after the other. A piece with such operators runs on onnx.reference, and other pieces on onnxruntime. Convolutions are
replaced by matrix products, and average pooling by sums.
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
from onnxgrad_cli.execution.conv_im2col import FIRST_OPSET, unfold_convolutions
from onnxgrad_cli.execution.executor import to_double, values_of_inputs
from onnxgrad_cli.execution.limits import limited, run_limited
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.node import messages
from onnxgrad_cli.ir.node_values import reads, schema_of, with_bodies
from onnxgrad_cli.ir.types import FLOATS, Arrays, dtype_of

SHARED = 1 << 20
"""Arrays of at least this many bytes in float64 are passed as `Deferred`.

Their float64 copy exists only while one piece runs, in memory that the next piece uses again.
"""

PIECE = 64 << 20
"""The most bytes of deferred arrays that one piece of the model may read. Further nodes are put into the next piece."""


class Deferred:
    """A float64 array that is created only when a piece of the model reads it, so that few exist at the same time.

    Args:
        shape: the shape of the array.
        fill: writes the elements into an array of this shape.
    """

    def __init__(self, shape: tuple[int, ...], fill: Callable[[np.ndarray], object]) -> None:
        self.shape, self.fill = shape, fill
        self.nbytes = 8 * math.prod(shape)

    @classmethod
    def copy(cls, x: np.ndarray) -> Deferred:
        """Return a deferred copy of an array."""
        return cls(x.shape, partial(np.copyto, src=x, casting="unsafe"))


class _Buffers:
    """Memory for deferred arrays. It is reused by later pieces and runs, because allocating new memory is slow."""

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray]] = defaultdict(list)

    def made(self, value: Deferred) -> np.ndarray:
        """Return a float64 array with the elements of a `Deferred`."""
        try:
            array = self._free[value.nbytes].pop().reshape(value.shape)
        except IndexError:
            array = np.empty(value.shape)
        value.fill(array)
        return array

    def give_back(self, arrays: Iterable[np.ndarray]) -> None:
        """Take back the memory of arrays that are no longer used."""
        for array in arrays:
            self._free[array.nbytes].append(array.reshape(-1))


class DoubleExecutor:
    """Runs a model in float64, on onnxruntime and, for operators without a float64 kernel there, on onnx.reference.

    Args:
        model: the model, with any float types; not changed.
        beside: True if two runs may take place at the same time. Then idle threads wait without using the processor.
        large: input that is fed as `Deferred` -> its size in bytes, in float64.

    Attributes:
        model, beside: the model in float64, and `beside` as given.
        inputs, outputs: input -> its element type, and the names of the outputs.
        readers: value -> the number of nodes that read it.

    Raises:
        Exception: neither onnxruntime nor onnx.reference can run the model. It is raised by the first run, not by the
            constructor.
    """

    _single: ClassVar[set[tuple[str, str]]] = {("", "Shrink")}
    """(domain, operator) of each operator that turned out to have no float64 kernel in onnxruntime.

    The set is shared by the whole process. Shrink is in it from the start, because its kernel accepts float64 but
    computes in float32.
    """

    def __init__(self, model: ModelProto, beside: bool = False, large: Mapping[str, int] | None = None) -> None:
        bare, self._fed = session.take_out(model, values_of_inputs(model, FLOATS), None)
        self._large = {**(large or {}), **large_sizes(self._fed)}
        self._buffers = _Buffers()
        self.model, self.beside = to_double(bare), beside
        unfolded = unfold_convolutions(self.model)
        old = any(is_standard(each.domain) and each.version < FIRST_OPSET for each in self.model.opset_import)
        self._newer = unfolded if old else set()
        graph = self.model.graph
        self.inputs = {value.name: dtype_of(value.type) for value in graph.input}
        self._stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
        self.outputs = [value.name for value in graph.output]
        self.readers = Counter(name for node in graph.node for name in set(reads(node)))
        self._pieces = [each for nodes in self._parts(graph.node) for each in self._split(nodes, trusted=True)]

    @property
    def name(self) -> str:
        """The names of the runtimes on which the pieces run, as far as earlier runs have shown."""
        runtime = f"onnxruntime {session.load_onnxruntime().__version__}"
        by_reference = [piece.by_reference for piece in self._pieces]
        if all(by_reference):
            return "onnx.reference"
        return f"{runtime} and onnx.reference" if any(by_reference) else runtime

    def _parts(self, nodes: Sequence[NodeProto]) -> list[list[NodeProto]]:
        """Divide the nodes, in order, into parts that each read at most about `PIECE` bytes of large inputs."""
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
        """Return the feeds that are inputs of the model, with floats converted to float64."""
        return {name: widened(x) for name, x in feeds.items() if name in self.inputs}

    def __call__(self, feeds: Mapping[str, np.ndarray | Deferred]) -> Arrays:
        """Return the model's outputs by name. Inputs that are not fed have their stored values."""
        values: dict[str, Any] = {**self._stored, **{n: x for n, x in self._fed.items() if n not in feeds}, **feeds}
        for name in self._fed.keys() - feeds.keys():
            values[name] = Deferred.copy(values[name]) if name in self._large else widened(values[name])
        at, pieces = 0, self._pieces  # the list is replaced, never changed: other runs may be reading it
        last = self._last_reads(pieces)
        while at < len(pieces):
            try:
                values |= pieces[at](values, self._buffers)
            except _NoKernel as error:
                self._single.update(error.operators)
                self._pieces = pieces = [*pieces[:at], *self._split(pieces[at].nodes), *pieces[at + 1 :]]
                last = self._last_reads(pieces)
                continue
            at += 1
            for name in last.get(at, ()):
                values.pop(name, None)
        return {name: values[name] for name in self.outputs}

    def on(self, feeds: Mapping[str, np.ndarray]) -> Arrays:
        """Return the model's outputs for feeds of any float type. Feeds that are not inputs are ignored."""
        return self(self.widened(feeds))

    def _split(self, whole: Sequence[NodeProto], trusted: bool = False) -> Iterator[_Piece]:
        """Yield pieces of consecutive nodes with the same executor and opset.

        onnx.reference runs operators that lack a kernel; and all pieces, if none is known to lack one and `trusted` is
        False.
        """
        trusted = trusted or any(map(self._is_single, whole))
        for (single, newer), nodes in groupby(whole, self._kind):
            by_reference, opset = single or not trusted, FIRST_OPSET if newer else None
            yield _Piece(self, list(nodes), by_reference, opset)

    def _kind(self, node: NodeProto) -> tuple[bool, bool]:
        """Return two flags of a node: it lacks a float64 kernel; it needs a newer opset than the model's."""
        return self._is_single(node), not self._newer.isdisjoint(node.output)

    def _is_single(self, node: NodeProto) -> bool:
        """Return True if a node, or one in its bodies, has no kernel that computes all its outputs in float64.

        LayerNormalization is such a node if it returns the mean and the deviation: its kernel computes these in
        float32.
        """
        nodes = list(with_bodies([node]))
        stashes = any(inner.op_type == "LayerNormalization" and any(inner.output[1:]) for inner in nodes)
        return stashes or not self._single.isdisjoint((inner.domain, inner.op_type) for inner in nodes)

    def _last_reads(self, pieces: Sequence[_Piece]) -> dict[int, list[str]]:
        """Return a map: number of pieces that have run -> the values to free, which no later piece reads."""
        last = {name: position for position, piece in enumerate(pieces, 1) for name in piece.inputs}
        gone: dict[int, list[str]] = defaultdict(list)
        for name, position in last.items():
            if name not in self.outputs:
                gone[position].append(name)
        return gone


def widened(x: np.ndarray) -> np.ndarray:
    """Return an array converted to float64 if it holds real floats, otherwise the array itself."""
    return np.asarray(x, np.float64) if _is_wide(x) else x


def large_sizes(arrays: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Return name -> size in bytes in float64, for the arrays of real floats that are to be passed as `Deferred`."""
    return {name: 8 * x.size for name, x in arrays.items() if _is_wide(x) and 8 * x.size >= SHARED}


def _is_wide(x: np.ndarray) -> bool:
    return x.dtype.kind not in "iubOSUc"


class _NoKernel(Exception):
    """onnxruntime has no float64 kernel for `operators`, a set of (domain, operator)."""

    def __init__(self, operators: set[tuple[str, str]]) -> None:
        super().__init__("no float64 kernel")
        self.operators = operators


class _Piece:
    """Consecutive nodes of a model that run together. The first run opens their session, when types are known."""

    def __init__(self, whole: DoubleExecutor, nodes: list[NodeProto], by_reference: bool, opset: int | None) -> None:
        self.nodes, self.by_reference = nodes, by_reference
        self._model, self._beside, self._opset = whole.model, whole.beside, opset
        made = {name for node in nodes for name in node.output if name}
        own = Counter(name for node in nodes for name in set(reads(node)))
        self.inputs = sorted(own.keys() - made)
        self.outputs = sorted(name for name in made if name in whole.outputs or whole.readers[name] > own[name])
        self._run: Callable[..., Any] | None = None
        # An evaluator of onnx.reference stores the state of a run in itself, so its runs must not overlap.
        self._alone = Lock() if by_reference else nullcontext()

    def __call__(self, values: Mapping[str, Any], buffers: _Buffers) -> Arrays:
        """Run this piece and return its outputs.

        Raises:
            _NoKernel: onnxruntime has no float64 kernel for an operator of the piece.
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
    """Return a value in the form that onnxruntime takes: numpy scalars become arrays, lists (sequences) stay."""
    return np.asarray(x) if isinstance(x, np.generic) else x


def _as_model(
    nodes: Sequence[NodeProto], inputs: Mapping[str, np.dtype[Any]], outputs: Sequence[str], like: ModelProto,
    opset: int | None = None,
) -> ModelProto:  # fmt: skip
    """Return a model that consists of some nodes of the model `like` and declares no shapes.

    If `opset` is given, it replaces the standard opset of `like`.
    """
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
    """Return the operators of the nodes that lack a kernel according to an error message of onnxruntime.

    The message names the operator. But if onnxruntime expands an operator into a function, the message names an
    operator inside the function. The bodies of functions that depend on types are not known here: if no other operator
    matches the message, the operators with such functions are opened one by one.
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
    """Return True if onnxruntime can open a model with one node of an operator, with all inputs in float64."""
    node = next(node for node in with_bodies(nodes) if (node.domain, node.op_type) == operator)
    inputs = {name: np.dtype(np.float64) for name in node.input if name}
    try:
        session.start_session(_as_model(messages([node]), inputs, list(filter(None, node.output)), model))
    except Exception:  # onnxruntime's exceptions share no public base class
        return False
    return True


def _body(operator: tuple[str, str], model: ModelProto) -> frozenset[str] | None:
    """Return the operators in the body of the function that defines an operator.

    The result is empty if the body depends on types, and None if no function defines the operator.
    """
    for function in model.functions:
        if (function.domain, function.name) == operator:
            return frozenset(node.op_type for node in function.node)
    domain, name = operator
    version = next((entry.version for entry in model.opset_import if entry.domain == domain), 1)
    schema: Any = schema_of(name, version, domain)
    if schema is None:
        return None
    if schema.has_function:
        return frozenset(node.op_type for node in schema.function_body.node)
    return frozenset() if schema.has_context_dependent_function else None
