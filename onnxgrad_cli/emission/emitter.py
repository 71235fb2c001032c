"""How rules write: `Val`, a value with operators, and `Op`, which emits typed nodes.

Every emitted node is typed the moment it is written, constants are pooled, equal nodes are written once, and
what is known at build time (a static shape, an axis of size one) is decided here rather than at run time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, NodeProto, TensorProto, TypeProto

from onnxgrad_cli.emission.values import VALUES, No, Val
from onnxgrad_cli.errors import Caution, OnnxgradError, Unknown
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.randomness import RANDOM
from onnxgrad_cli.ir.renaming import rename
from onnxgrad_cli.ir.types import HALVES, Dim, Shape, dtype_of, shape_of, tensor_type

ROLE, FORWARD = "onnxgrad.role", "onnxgrad.forward"
"""Keys in a node's metadata: the part of the training model it belongs to, and the forward node it differentiates."""


class Op:
    """The emitter: `op.MatMul(a, b)` appends a typed node to `nodes` and returns its output.

    Any operator can be called by its name; a number or an array among the inputs becomes a constant in the type
    of the first value, `outputs=n` returns a tuple, and attributes are keywords (None is left out). Names in
    lower case are shorthands that also decide at build time what can be decided then.

    Attributes:
        nodes: what was emitted, in order.
        scope, role, forward: the stem of the names of new nodes, and what their metadata say of them.
        wanted: whether anybody wants the cotangent of a value.
        node, training: the forward node that is being differentiated, and the record of the walk that does it.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.nodes: list[NodeProto] = []
        self._sheet = GraphProto()  # where they lie together in memory: going through them takes less time
        self.scope = ""
        self.role = ""
        self.forward = ""
        self.cautions: list[Caution] = []
        self.wanted: Callable[[str], bool] = lambda name: True
        self.node: NodeProto | None = None
        self.training: Any = None
        self._readers: dict[str, list[tuple[NodeProto, int]]] | None = None
        self._makers: dict[str, NodeProto] | None = None
        self._vals: dict[str, Val] = {}
        self._shapes: dict[int, tuple[TypeProto | None, Shape | None]] = {}
        self._types: dict[tuple[Dim | None, ...], TypeProto] = {}
        self._pool: dict[tuple[Any, ...], Val] = {}
        self._written: dict[tuple[Any, ...], Any] = {}
        self._unexpanded: dict[str, Val] = {}
        self._scattered: dict[str, tuple[Val, Val, int]] = {}
        self._renamed: dict[str, str] = {}
        self._schemas: dict[tuple[str, str], onnx.defs.OpSchema] = {}
        self._defaults: dict[tuple[str, str], dict[str, Any]] = {}
        self._imports = list(graph.proto.opset_import)
        self.opset = graph.opset() or 1

    # -- values ---------------------------------------------------------------------------------------------

    def val(self, name: str) -> Val:
        """The value called `name`."""
        value_type = self.graph.types.get(name)
        known = self._vals.get(name)
        if known is None or known.type is not value_type:
            known = self._vals[name] = Val(self, name, value_type, self._shape(value_type))
        return known

    def _shape(self, value_type: TypeProto | None) -> Shape | None:
        """The shape in a type, read once: many values share one type."""
        found = self._shapes.get(id(value_type))
        if found is None:
            found = self._shapes[id(value_type)] = (value_type, shape_of(value_type))  # kept, so that its id stays
        return found[1]

    def readers(self, name: str) -> list[tuple[NodeProto, int]]:
        """The forward nodes that read a value, and at which input (-1: inside a subgraph)."""
        if self._readers is None:
            self._readers = self.graph.uses()
        return self._readers.get(name, [])

    def maker(self, x: Val) -> NodeProto | None:
        """The forward node that makes a value."""
        if self._makers is None:
            self._makers = self.graph.producers()
        return self._makers.get(x.name)

    def wants(self, x: Val | None) -> bool:
        """Whether anybody wants the cotangent of `x`."""
        return x is not None and self.wanted(x.name)

    def variant(self, name: str, forms: Sequence[str], default: str) -> str:
        """Which of several forms of a gradient to write: `default`, unless another one is preferred or requested."""
        return default if self.training is None else self.training.kernel_variants.choose(self, name, forms, default)

    def no(self, reason: str, hint: str = "") -> No:
        """Refuse the cotangent of one operand, with the reason."""
        return No(reason, hint)

    def const(self, value: Any, dtype: int | Val | None = None) -> Val:
        """A constant: a number or an array, in `dtype` or the type of a value; ints default to int64."""
        if isinstance(dtype, Val):
            dtype = dtype.dtype
        scalar = (type(value), value, dtype) if isinstance(value, (int, float)) else None
        if scalar is not None and scalar in self._pool:
            return self._pool[scalar]
        array = np.asarray(value)
        if dtype is not None:
            array = array.astype(onnx.helper.tensor_dtype_to_np_dtype(dtype))
        key = (array.dtype.num, array.shape, array.tobytes())
        if key not in self._pool:
            name = self.graph.fresh("const")
            self.graph.add_initializer(name, array)
            self._pool[key] = self.val(name)
        if scalar is not None:
            self._pool[scalar] = self._pool[key]
        return self._pool[key]

    def ints(self, values: Sequence[int]) -> Val:
        """A constant int64 vector."""
        key = tuple(values)
        if key not in self._pool:
            self._pool[key] = self.const(np.asarray(key, dtype=np.int64).reshape(-1))
        return self._pool[key]

    # -- emission -------------------------------------------------------------------------------------------

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        if not op_type[:1].isupper():
            raise AttributeError(op_type)
        emit = self.__dict__[op_type] = partial(self.emit, op_type)  # the next call finds it at once
        return emit

    def emit(
        self,
        op_type: str,
        *inputs: Any,
        outputs: int = 1,
        domain: str = "",
        shape: Sequence[Dim | None] | None = None,
        types: Sequence[TypeProto] | None = None,
        **attributes: Any,
    ) -> Any:
        """Append a node; `shape` states the first output's shape where the caller knows more than inference, `types`
        all that is to be known of the outputs."""
        if domain:
            self.graph.use_domain(domain)
        values: list[Val | None] = list(inputs)
        if set(map(type, inputs)) != VALUES:
            like = next((x for x in inputs if isinstance(x, Val)), None)
            values = [x if x is None or isinstance(x, Val) else self.const(x, like) for x in inputs]
            while values and values[-1] is None:
                values.pop()
        if op_type in _BINARY and self._unexpanded:
            values = self._broadcast_late(*values)  # type: ignore[arg-type]
        if op_type in _BROADCASTING:
            values = self._lengthened(values)
        if op_type == "Add" and self._scattered and (total := self._scattered_onto(*values)):  # type: ignore[arg-type]
            return total
        given = [onnx.helper.make_attribute(n, v) for n, v in attributes.items() if v is not None] if attributes else ()
        names = tuple([x.name if x is not None else "" for x in values])
        said = tuple(sorted([a.SerializeToString() for a in given])) if given else ()
        key = (op_type, domain, names, said, outputs)
        if key in self._written and op_type not in RANDOM:
            return self._written[key]
        node_name = self.graph.fresh(f"{self.scope}/{op_type}" if self.scope else op_type)
        out = [self.graph.fresh(f"{node_name}_out")]
        out += [self.graph.fresh(f"{node_name}_out{i}") for i in range(1, outputs)] if outputs > 1 else ()
        node = self._sheet.node.add(op_type=op_type, input=names, output=out, name=node_name, domain=domain)
        if given:
            node.attribute.extend(given)
        if self.role:
            node.metadata_props.add(key=ROLE, value=self.role)
        if self.forward:
            node.metadata_props.add(key=FORWARD, value=self.forward)
        first = values[0] if values else None
        same = self._elementwise(first, values[-1]) if op_type in _ELEMENTWISE and first and values[-1] else None
        if types is not None:
            self.graph.types.update(zip(out, types, strict=True))
        elif same is not None:
            self.graph.types[out[0]] = same.type  # type: ignore[assignment]
        elif op_type in _SAME_DTYPE and first is not None and shape is not None:
            self.graph.types[out[0]] = self._typed(first.dtype, shape)
        else:
            found = self.infer(node, values)
            if shape is not None:
                found[out[0]] = self.graph.named(tensor_type(dtype_of(found[out[0]]), shape))
            self.graph.types.update(found)
        if types is not None or (shape is not None and op_type not in _FROM_TYPES):
            self.graph.stated.update(out)
        self.nodes.append(node)
        result = self._written[key] = tuple([self.val(name) for name in out]) if outputs > 1 else self.val(out[0])
        return result

    def _typed(self, dtype: int, shape: Sequence[Dim | None]) -> TypeProto:
        """The type of a tensor: one object for all values of it, where each size is known or has a symbol."""
        key = (dtype, *shape)
        if key not in self._types:
            value_type = self.graph.named(tensor_type(dtype, shape))
            if None in shape or "?" in shape:
                return value_type
            self._types[key] = self.graph.shared(value_type)
        return self._types[key]

    def _elementwise(self, a: Val, b: Val) -> Val | None:
        """The operand that has the type of an elementwise result; None where that takes more than a look."""
        left, right = a._shape, b._shape
        if left is None or right is None or "?" in left or "?" in right:
            return None
        if len(right) <= len(left) and (left[len(left) - len(right) :] == right or set(right) == {1}):
            return a
        return b if len(left) < len(right) and (right[len(right) - len(left) :] == left or set(left) == {1}) else None

    def infer(self, node: NodeProto, values: Sequence[Val | None] | None = None) -> dict[str, TypeProto]:
        """The types of a node's outputs, as onnx infers them from those of its inputs; raises Unknown without those."""
        schema = self.schema(_TYPED_AS.get(node.op_type, node.op_type), node.domain)
        if values is None:
            values = [self.val(name) if name else None for name in node.input]
        for x in values:
            if x is not None and x.type is None:
                raise Unknown(f"the type of '{x.name}' is unknown")
        types = {x.name: x.type for x in values if x is not None and x.type is not None}
        data = {x.name: self.graph.initializers[x.name] for x in values if x is not None and x.const is not None}
        try:
            found = onnx.shape_inference.infer_node_outputs(schema, node, types, data, opset_imports=self._imports)
        except (onnx.shape_inference.InferenceError, KeyError) as error:
            raise OnnxgradError(f"internal: {node.name} does not type: {str(error).strip()} ({values})") from error
        return {name: self.graph.shared(self.graph.named(value_type)) for name, value_type in found.items()}

    def schema(self, op_type: str, domain: str = "") -> onnx.defs.OpSchema:
        """The schema of an operator at the model's opset."""
        key = (op_type, domain)
        if key not in self._schemas:
            self._schemas[key] = onnx.defs.get_schema(op_type, self.graph.opset(domain) or 1, domain)
        return self._schemas[key]

    def attributes(self, op_type: str, domain: str = "") -> dict[str, Any]:
        """The attributes of an operator with their defaults (None where there is none); {} without a schema."""
        key = (op_type, domain)
        if key not in self._defaults:
            try:
                schema = self.schema(op_type, domain)
            except onnx.defs.SchemaError:
                return self._defaults.setdefault(key, {})
            given = {name: attribute.default_value for name, attribute in schema.attributes.items()}
            values = {name: onnx.helper.get_attribute_value(a) if a.type else None for name, a in given.items()}
            self._defaults[key] = {k: v.decode() if isinstance(v, bytes) else v for k, v in values.items()}
        return self._defaults[key]

    def _broadcast_late(self, a: Val, b: Val) -> list[Val | None]:
        """Elementwise operators broadcast by themselves: an expanded operand goes in unexpanded."""
        if a.known_shape == b.known_shape and a.known_shape is not None and "?" not in a.known_shape:
            if a.name in self._unexpanded and b.name not in self._unexpanded:
                return [self._unexpanded[a.name], b]
            if b.name in self._unexpanded and a.name not in self._unexpanded:
                return [a, self._unexpanded[b.name]]
        return [a, b]

    def _lengthened(self, values: list[Val | None]) -> list[Val | None]:
        """Operands of one element, with an axis before those of size one that a large operand ends in.

        onnxruntime goes through such an operand one element at a time where the other has no such axis: a scalar times
        2048 x 1024 x 1 x 1, as the weights of 1x1 convolutions are, takes 100 times as long as times 2048 x 1024.
        """
        largest = max((x._shape or () for x in values if x), key=len)
        if largest[-1:] != (1,) or math.prod([dim for dim in largest if isinstance(dim, int)] or [0]) < _LARGE:
            return values
        ones = next((i for i, dim in enumerate(reversed(largest)) if dim != 1), 0)
        return [self._with_axes(x, ones + 1) if x and _is_single(x) and x.rank <= ones else x for x in values]

    def _with_axes(self, x: Val, rank: int) -> Val:
        """An operand of one element with `rank` axes."""
        return self.reshape(x, [1] * rank) if x.const is None else self.const(x.const.reshape([1] * rank))

    def scatter(self, zeros: Val, places: Val, updates: Val, axis: int, repeats: bool = True) -> Val:
        """ScatterElements of `updates` onto zeros, added up where a place may repeat.

        What is added to the result later is scattered onto in place of the zeros: 0.6 of the time of both for 256 rows
        of 50,257 x 768 (one thread), and a tensor less in memory.
        """
        attributes = {"axis": axis, "reduction": "add"} if repeats else {"axis": axis}
        result = self.ScatterElements(zeros, places, updates, **attributes)
        if self.opset >= 16 and updates.dtype not in HALVES:  # onnxruntime adds none of 16 bits
            self._scattered[result.name] = (places, updates, axis)
        return result

    def _scattered_onto(self, a: Val, b: Val) -> Val | None:
        """The sum of two values of one shape, one of which was scattered onto zeros; None where none was."""
        for scattered, base in ((a, b), (b, a)):
            if scattered.name in self._scattered and self.same_shape(a, b):
                places, updates, axis = self._scattered[scattered.name]
                return self.ScatterElements(base, places, updates, axis=axis, reduction="add")
        return None

    def _scattered_sum(self, x: Val, axes: Sequence[int] | None) -> Val | None:
        """The sum of a value along the one axis where, elsewhere at each place, one number was scattered onto zeros."""
        if x.name not in self._scattered or axes is None or len(axes) != 1:
            return None
        _, updates, axis = self._scattered[x.name]
        axis %= x.rank
        one = [1 if i == axis else size for i, size in enumerate(x.shape)]
        return updates if axes[0] % x.rank == axis and list(updates.shape) == one and "?" not in one else None

    def rename(self, value: Val, name: str) -> Val:
        """Call a result of this emitter `name`; a value from elsewhere, or with such a name, becomes an Identity."""
        self.rename_all({name: value})
        return self.val(name)

    def rename_all(self, results: Mapping[str, Val]) -> None:
        """Call each result by the name before it, as `rename` does; one with several names becomes Identities."""
        made = set(itertools.chain.from_iterable([node.output[:] for node in self.nodes]))
        claimed = set(self._renamed.values())
        names: dict[str, str] = {}
        for name, value in results.items():
            value = self.val(self._renamed.get(value.name, value.name))
            while value.name not in made or value.name in claimed or value.name in names:
                value = self.emit("Identity", value)
                made.add(value.name)
            names[value.name] = name
        rename(self.nodes, names)
        for old, new in names.items():
            self.graph.types[new] = self.graph.types[old]
            if old in self.graph.stated:
                self.graph.stated.add(new)
        self._renamed.update(names)
        self._written.clear()
        self._scattered.clear()

    # -- shapes ---------------------------------------------------------------------------------------------

    def shape(self, x: Val) -> Val:
        """The shape of `x` as an int64 vector: a constant where it is static."""
        if x.known_shape is not None and all(isinstance(dim, int) for dim in x.known_shape):
            return self.ints(x.known_shape)  # type: ignore[arg-type]
        return self.Shape(x)

    def dim(self, x: Val, axis: int) -> Val:
        """The size of one axis of `x` as an int64 vector of one element."""
        axis %= x.rank
        size = x.shape[axis]
        if isinstance(size, int):
            return self.ints([size])
        if self.opset < 15:
            return self.Gather(self.Shape(x), self.ints([axis]))
        return self.Shape(x, start=axis, end=axis + 1)

    def size(self, x: Val, axis: int) -> int | Val:
        """The size of one axis of `x`: an int where it is static, else an int64 vector of one element."""
        size = x.shape[axis]
        return size if isinstance(size, int) else self.dim(x, axis)

    def count(self, x: Val, axes: Sequence[int] | None = None, dtype: int | None = None) -> Val:
        """How many elements of `x` lie along `axes` (all of them: None), as a scalar in x's type or `dtype`."""
        dtype = dtype or x.dtype
        if x.known_shape is not None:
            sizes = [x.shape[axis] for axis in (range(x.rank) if axes is None else axes)]
            known = [size for size in sizes if isinstance(size, int)]
            if len(known) == len(sizes):
                return self.const(float(math.prod(known)), dtype)
        if axes is None:
            return self.Cast(self.Size(x), to=dtype)
        chosen = self.Gather(self.Shape(x), self.ints([axis % x.rank for axis in axes]))
        return self.Cast(self.ReduceProd(chosen, keepdims=0), to=dtype)

    def per(self, g: Val, x: Val, axes: Sequence[int] | None = None) -> Val:
        """`g` divided by how many elements of `x` lie along `axes`: in float32 for the half types, which such a
        count overflows (float16) or loses digits in (bfloat16)."""
        wide = self.wide(g)
        return self.cast(wide / self.count(x, axes, wide.dtype), g)

    def reshape(self, x: Val, dims: Sequence[int | Val]) -> Val:
        """`x` in the given dimensions: ints (-1 at most once, no 0 by position) or one-element int64 vectors."""
        if all(isinstance(dim, int) for dim in dims):
            if x.known_shape == tuple(dims):
                return x
            literal = self._literal_zeros() if 0 in dims and -1 not in dims else None
            return self.Reshape(x, self.ints(dims), allowzero=literal)  # type: ignore[arg-type]
        shape = [dim if isinstance(dim, int) and dim > 0 else None for dim in dims]
        literal = None if -1 in [dim for dim in dims if isinstance(dim, int)] else self._literal_zeros()
        return self.Reshape(x, self.vector(dims), allowzero=literal, shape=shape)

    def reshape_like(self, x: Val, like: Val) -> Val:
        """`x` in the shape of `like`, without reading `like` at run time where its symbols can be had from `x`."""
        if self.same_shape(x, like):
            return x
        dims = self._dims_like(x, like)
        if dims:
            return self.Reshape(x, self.ints(dims), shape=like.known_shape)
        return self.Reshape(x, self.shape(like), allowzero=self._literal_zeros(), shape=like.known_shape)

    def _dims_like(self, x: Val, like: Val) -> list[int] | None:
        """The shape of `like` with its only symbol as -1, or its symbols as 0 where `x` has the same at that axis."""
        shape, own = like.known_shape, x.known_shape or ()
        if shape is None or 0 in shape:
            return None
        several = sum(isinstance(dim, str) for dim in shape) > 1
        equal = [several and dim != "?" and own[axis : axis + 1] == (dim,) for axis, dim in enumerate(shape)]
        dims = [d if isinstance(d, int) else 0 if same else -1 for d, same in zip(shape, equal, strict=True)]
        return None if several and -1 in dims else dims

    def _literal_zeros(self) -> int | None:
        """Reshape's `allowzero`, so that a size of 0 is a size; before opset 14 it means 'as it was'."""
        return 1 if self.opset >= 14 else None

    def same_shape(self, a: Val, b: Val) -> bool:
        """Whether two values surely have one shape: equal sizes or equal symbols on every axis."""
        return a._shape is not None and a._shape == b._shape and "?" not in a._shape

    def transpose(self, x: Val, perm: Sequence[int]) -> Val:
        """`x` with its axes permuted."""
        return x if list(perm) == list(range(len(perm))) else self.Transpose(x, perm=list(perm))

    def swap_last(self, x: Val) -> Val:
        """`x` with its last two axes exchanged: the matrix transpose."""
        axes = list(range(x.rank))
        return self.transpose(x, [*axes[:-2], axes[-1], axes[-2]])

    def squeeze(self, x: Val, axes: Sequence[int]) -> Val:
        """`x` without the given axes, each of size one."""
        return self.Squeeze(x, self.ints(axes)) if axes else x

    def unsqueeze(self, x: Val, axes: Sequence[int]) -> Val:
        """`x` with axes of size one where the result has `axes`."""
        return self.Unsqueeze(x, self.ints(axes)) if axes else x

    def split(self, x: Val, sizes: Sequence[int | Val], axis: int) -> tuple[Val, ...]:
        """`x` cut along `axis` into pieces of the given sizes: ints, or one-element int64 vectors."""
        if len(sizes) == 1:
            return (x,)
        return self.Split(x, self.vector(sizes), axis=axis, outputs=len(sizes))

    def vector(self, parts: Sequence[int | Val]) -> Val:
        """An int64 vector of ints and int64 vectors, one after the other."""
        if all(isinstance(part, int) for part in parts):
            return self.ints(parts)  # type: ignore[arg-type]
        return self.Concat(*(p if isinstance(p, Val) else self.ints([p]) for p in parts), axis=0)

    def state(self, x: Val, shape: Sequence[Dim | None] | None) -> Val:
        """`x`, whose shape the caller knows where inference does not."""
        self.graph.types[x.name] = self.graph.named(tensor_type(x.dtype, shape))
        self.graph.stated.add(x.name)
        return self.val(x.name)

    def cast(self, x: Val, dtype: int | Val) -> Val:
        """`x` in another element type."""
        to = dtype.dtype if isinstance(dtype, Val) else dtype
        return x if x.dtype == to else self.Cast(x, to=to)

    def wide(self, x: Val) -> Val:
        """`x` in the type in which statistics are taken: float32 for the half types, as operators do."""
        return self.cast(x, TensorProto.FLOAT) if x.dtype in HALVES else x

    def fill(self, value: float, like: Val) -> Val:
        """A tensor of one value in the shape and type of `like`."""
        array = np.full(1, value, onnx.helper.tensor_dtype_to_np_dtype(like.dtype))
        tensor = onnx.numpy_helper.from_array(array)
        return self.ConstantOfShape(self.shape(like), value=tensor, shape=like.known_shape)

    def zeros(self, dims: Sequence[int | Val], dtype: int | Val) -> Val:
        """Zeros in the given dimensions: ints, or one-element int64 vectors."""
        to = dtype.dtype if isinstance(dtype, Val) else dtype
        tensor = onnx.numpy_helper.from_array(np.zeros(1, onnx.helper.tensor_dtype_to_np_dtype(to)))
        known = [dim if isinstance(dim, int) else None for dim in dims]
        return self.ConstantOfShape(self.vector(dims), value=tensor, shape=known)

    def steps(self, size: int | Val, axis: int = 0, rank: int = 1) -> Val:
        """0, 1, ... below `size` (an int, or a one-element int64 vector) along `axis` of `rank` axes; int64."""
        if isinstance(size, int):
            return self.const(np.arange(size, dtype=np.int64).reshape([-1 if i == axis else 1 for i in range(rank)]))
        row = self.Range(self.const(0), self.squeeze(size, [0]), self.const(1))
        return self.unsqueeze(row, [i for i in range(rank) if i != axis])

    def expand_like(self, x: Val, like: Val) -> Val:
        """`x`, which broadcasts to `like`, in the full shape of `like`."""
        if self.same_shape(x, like):
            return x
        if 0 in (like.known_shape or ()):  # onnxruntime's optimizer takes an Expand to no elements out
            return self.fill(0.0, like)
        result = self.Expand(x, self.shape(like), shape=like.known_shape)
        self._unexpanded[result.name] = x
        return result

    # -- reductions: their axes moved from attribute to input at opset 18 (ReduceSum at 13) ----------------------

    def sum(self, x: Val, axes: Sequence[int] | None = None, keepdims: bool = True) -> Val:
        """The sum over `axes` (None: all)."""
        scattered = self._scattered_sum(x, axes) if self._scattered and keepdims else None
        return scattered or self.reduce("ReduceSum", x, axes, keepdims)

    def mean(self, x: Val, axes: Sequence[int] | None = None, keepdims: bool = True) -> Val:
        """The mean over `axes` (None: all)."""
        return self.reduce("ReduceMean", x, axes, keepdims)

    def max(self, x: Val, axes: Sequence[int] | None = None, keepdims: bool = True) -> Val:
        """The maximum over `axes` (None: all)."""
        return self.reduce("ReduceMax", x, axes, keepdims)

    def prod(self, x: Val, axes: Sequence[int] | None = None, keepdims: bool = True) -> Val:
        """The product over `axes` (None: all)."""
        return self.reduce("ReduceProd", x, axes, keepdims)

    def reduce(self, kind: str, x: Val, axes: Sequence[int] | None = None, keepdims: bool = True) -> Val:
        """The reduction `kind`, an operator's name, over `axes` (None: all); half types are added up in float32."""
        if axes is not None and not list(axes):
            return x
        if x.dtype in HALVES and kind not in _EXACT:
            return self.cast(self.reduce(kind, self.wide(x), axes, keepdims), x)
        axes = None if axes is None else [axis % x.rank for axis in axes]
        shape = None
        if x.known_shape is not None:
            gone = range(x.rank) if axes is None else axes
            kept = [1 if axis in gone else size for axis, size in enumerate(x.shape)]
            shape = kept if keepdims else [size for axis, size in enumerate(kept) if axis not in gone]
        keep = int(keepdims)
        if self.opset >= (13 if kind == "ReduceSum" else 18):
            return self.emit(kind, x, None if axes is None else self.ints(axes), keepdims=keep, shape=shape)
        return self.emit(kind, x, axes=axes, keepdims=keep, shape=shape)

    # -- broadcasting -----------------------------------------------------------------------------------------

    def sum_to(self, g: Val, x: Val) -> Val:
        """`g`, which has a shape that `x` broadcasts to, summed down to the shape of `x`.

        The only place that knows about broadcasting. Equal size or equal symbol: nothing; the operand's size
        is 1: sum; two different symbols, or unknown rank: decided at run time, and counted in the report.
        """
        if self.same_shape(g, x):
            return g
        if g.known_shape is None or x.known_shape is None:
            return self._sum_to_at_run_time(g, x, "an unknown rank")
        lead = g.rank - x.rank
        axes = list(range(lead))
        for axis, (have, want) in enumerate(zip(g.shape[lead:], x.shape, strict=True), lead):
            if have == want and have != "?":
                continue
            if want == 1:
                axes.append(axis)
            elif isinstance(want, str) and have != 1:
                return self._sum_to_at_run_time(g, x, f"'{have}' against '{want}' on axis {axis - lead}")
        if not axes:
            return g
        if len(axes) == lead:
            return self.sum(g, axes, keepdims=False)
        return self.squeeze(self.sum(g, axes), list(range(lead)))

    def _sum_to_at_run_time(self, g: Val, x: Val, why: str) -> Val:
        node = self.forward or self.scope
        text = f"{node}: un-broadcast of '{x.name}' decided at run time ({why})"
        self.cautions.append(Caution("run-time sum", node, text))
        wanted = self.shape(x)
        missing = self.Sub(self.Size(self.Shape(g)), self.Size(wanted))
        ones = self.Expand(self.ints([1]), self.Reshape(missing, self.ints([1])))
        single = self.Equal(self.Concat(ones, wanted, axis=0), self.ints([1]))
        axes = self.Reshape(self.NonZero(single), self.ints([-1]))
        shape = None if g.known_shape is None else [None] * g.rank
        summed = self.ReduceSum(self.wide(g), axes, keepdims=1, noop_with_empty_axes=1, shape=shape)
        return self.Reshape(self.cast(summed, g), wanted, allowzero=self._literal_zeros(), shape=x.known_shape)


_EXACT = frozenset({"ReduceMax", "ReduceMin"})
"""Reductions that round nothing."""


_TYPED_AS = {"GreaterOrEqual": "Greater", "LessOrEqual": "Less"}
"""Operators for which onnx infers no shape before opset 16, and others that have the same types."""


_BINARY = frozenset({"Add", "Sub", "Mul", "Div"})


_BROADCASTING = _BINARY | {"Pow", "Max", "Min", "Where", "Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"}


_LARGE = 1024
"""Elements from which the form of a one-element operand is worth a node."""


_SAME_DTYPE = frozenset({"Reshape", "Expand", "ReduceSum", "ReduceMean", "ReduceMax"})
"""Operators whose result has the type of their first operand, so that a stated shape is all there is to know."""


_FROM_TYPES = frozenset({"ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd"})
"""Operators of which a shape is stated for speed: it follows from the types of the operands and constant axes."""


_ELEMENTWISE = _BINARY | {"Neg", "Exp", "Sigmoid", "Tanh", "Sqrt", "Reciprocal"}
"""Operators whose result has the type of an operand, but for broadcasting; the rest is inferred by onnx."""


def _is_single(x: Val) -> bool:
    """Whether a value surely has one element."""
    return x.known_shape is not None and set(x.known_shape) <= {1}
