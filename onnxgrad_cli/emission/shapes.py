"""`ShapeOps`: read and change the shapes of values. Static sizes are resolved at build time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import onnx

from onnxgrad_cli.emission.node_emitter import NodeEmitter
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.errors import Unknown
from onnxgrad_cli.ir.types import known_sizes

MAX_COUNTING_LENGTH = 1 << 24
"""Largest length of a vector 0, 1, 2, ... that is stored as a constant, and largest number of taps of a window.

The limit exists because a small model may request billions of elements.
"""

LONGEST_RANGE = 1 << 26
"""Largest length of a vector 0, 1, 2, ... that is computed by a Range with constant operands.

onnx computes such a Range during shape inference. Above half a gigabyte, shape inference exceeds its memory limit and
may crash.
"""


class ShapeOps(NodeEmitter):
    """Shorthands for shapes. A size is an int if it is static, otherwise an int64 vector of one element."""

    # -- the shape of a value -------------------------------------------------------------------------------

    def shape(self, x: Val) -> Val:
        """Return the shape of `x` as an int64 vector, which is a constant if the shape is static."""
        sizes = known_sizes(x.known_shape)
        return self.Shape(x) if sizes is None else self.ints(sizes)

    def dim(self, x: Val, axis: int) -> Val:
        """Return the size of one axis of `x` as an int64 vector of one element."""
        axis %= x.rank
        size = x.shape[axis]
        if isinstance(size, int):
            return self.ints([size])
        if self.opset < 15:
            return self.Gather(self.Shape(x), self.ints([axis]))
        return self.Shape(x, start=axis, end=axis + 1)

    def size(self, x: Val, axis: int) -> int | Val:
        """Return the size of one axis of `x`: an int if it is static, otherwise an int64 vector of one element."""
        size = x.shape[axis]
        return size if isinstance(size, int) else self.dim(x, axis)

    def sizes(self, x: Val, axes: Iterable[int] | None = None) -> list[int | Val]:
        """Return `size` for some axes of `x` (None: all)."""
        return [self.size(x, axis) for axis in (range(x.rank) if axes is None else axes)]

    def count(self, x: Val, axes: Sequence[int] | None = None, dtype: int | None = None) -> Val:
        """Return the number of elements of `x` along `axes` (None: all) as a scalar in `dtype` or the type of `x`."""
        dtype = dtype or x.dtype
        sizes = x.known_shape and [x.shape[axis] for axis in (range(x.rank) if axes is None else axes)]
        if (known := known_sizes(sizes)) is not None:
            return self.const(float(math.prod(known)), dtype)
        if axes is None:
            return self.Cast(self.Size(x), to=dtype)
        chosen = self.Gather(self.Shape(x), self.ints([axis % x.rank for axis in axes]))
        return self.Cast(self.ReduceProd(chosen, keepdims=0), to=dtype)

    def per(self, g: Val, x: Val, axes: Sequence[int] | None = None) -> Val:
        """Return `g` divided by the number of elements of `x` along `axes`.

        float16 and bfloat16 are divided in float32, because the number of elements may overflow float16 or lose digits
        in bfloat16.
        """
        wide = self.wide(g)
        return self.cast(wide / self.count(x, axes, wide.dtype), g)

    def same_shape(self, a: Val, b: Val) -> bool:
        """Return True if two values are known to have equal shapes: the same size or symbol on every axis."""
        return a._shape is not None and a._shape == b._shape and "?" not in a._shape

    def vector(self, parts: Sequence[int | Val]) -> Val:
        """Return an int64 vector that concatenates ints and int64 vectors."""
        if all(isinstance(part, int) for part in parts):
            return self.ints(parts)  # type: ignore[arg-type]
        return self.Concat(*(p if isinstance(p, Val) else self.ints([p]) for p in parts), axis=0)

    # -- the same elements in a different shape -----------------------------------------------------------------

    def reshape(self, x: Val, dims: Sequence[int | Val]) -> Val:
        """Return `x` reshaped to the given dimensions.

        Args:
            x: the value.
            dims: ints or one-element int64 vectors. -1 may appear once. 0 is a size of 0, not a copied size.
        """
        if all(isinstance(dim, int) for dim in dims):
            if x.known_shape == tuple(dims):
                return x
            literal = self._literal_zeros() if 0 in dims and -1 not in dims else None
            if 0 in dims and -1 not in dims and literal is None:  # the result has no elements
                return self.zeros(dims, x)
            return self.Reshape(x, self.ints(dims), allowzero=literal)  # type: ignore[arg-type]
        shape = [dim if isinstance(dim, int) and dim > 0 else None for dim in dims]
        literal = None if -1 in [dim for dim in dims if isinstance(dim, int)] else self._literal_zeros()
        return self.Reshape(x, self.vector(dims), allowzero=literal, shape=shape)

    def reshape_like(self, x: Val, like: Val) -> Val:
        """Return `x` in the shape of `like`. If that shape can be derived from `x`, `like` is not read at run time."""
        if self.same_shape(x, like):
            return x
        dims, shape = self._dims_like(x, like), like.known_shape
        if dims:
            return self.Reshape(x, self.ints(dims), shape=shape)
        if shape is not None and 0 in shape and all(isinstance(dim, int) for dim in shape):
            return self.reshape(x, shape)  # type: ignore[arg-type]
        return self.Reshape(x, self.shape(like), allowzero=self._literal_zeros(), shape=like.known_shape)

    def _dims_like(self, x: Val, like: Val) -> list[int] | None:
        """Return the entries of a constant with which Reshape gives `x` the shape of `like`, or None if there is none.

        If one size of `like` is a symbol, its entry is -1. If several sizes are symbols, their entries are 0, which
        copies the size of `x`. This requires that `x` has the same symbol on each of these axes.
        """
        shape, own = like.known_shape, x.known_shape or ()
        if shape is None or 0 in shape:
            return None
        several = sum(isinstance(dim, str) for dim in shape) > 1
        equal = [several and dim != "?" and own[axis : axis + 1] == (dim,) for axis, dim in enumerate(shape)]
        dims = [d if isinstance(d, int) else 0 if same else -1 for d, same in zip(shape, equal, strict=True)]
        return None if several and -1 in dims else dims

    def _literal_zeros(self) -> int | None:
        """Return the value of `allowzero` with which a 0 in a Reshape means size 0, or None before opset 14.

        Without the attribute, a 0 copies the size of the input.
        """
        return 1 if self.opset >= 14 else None

    def transpose(self, x: Val, perm: Sequence[int]) -> Val:
        """Return `x` with its axes permuted."""
        return x if list(perm) == list(range(len(perm))) else self.Transpose(x, perm=list(perm))

    def swap_last(self, x: Val) -> Val:
        """Return `x` with its last two axes swapped, the matrix transpose."""
        axes = list(range(x.rank))
        return self.transpose(x, [*axes[:-2], axes[-1], axes[-2]])

    def squeeze(self, x: Val, axes: Sequence[int]) -> Val:
        """Return `x` without the given axes of size one."""
        return self.Squeeze(x, self.ints(axes)) if axes else x

    def unsqueeze(self, x: Val, axes: Sequence[int]) -> Val:
        """Return `x` with new axes of size one at the positions `axes` of the result."""
        return self.Unsqueeze(x, self.ints(axes)) if axes else x

    def split(self, x: Val, sizes: Sequence[int | Val], axis: int) -> tuple[Val, ...]:
        """Split `x` along `axis` into pieces. Each size is an int or a one-element int64 vector."""
        if len(sizes) == 1:
            return (x,)
        return self.Split(x, self.vector(sizes), axis=axis, outputs=len(sizes))

    # -- tensors made from a shape --------------------------------------------------------------------------

    def fill(self, value: float, like: Val) -> Val:
        """Return a tensor in the shape and type of `like` whose elements are `value`."""
        return self.ConstantOfShape(self.shape(like), value=_single(value, like.dtype), shape=like.known_shape)

    def zeros(self, dims: Sequence[int | Val], dtype: int | Val) -> Val:
        """Return a tensor of zeros.

        Args:
            dims: the sizes, each an int or a one-element int64 vector.
            dtype: the element type, or a value with this type.
        """
        to = dtype.dtype if isinstance(dtype, Val) else dtype
        known = [dim if isinstance(dim, int) else None for dim in dims]
        return self.ConstantOfShape(self.vector(dims), value=_single(0, to), shape=known)

    def steps(self, size: int | Val, axis: int = 0, rank: int = 1) -> Val:
        """Return 0, 1, ..., `size` - 1 as int64, along `axis` of `rank` axes.

        Args:
            size: an int, or a one-element int64 vector.
            axis: the axis along which the numbers lie.
            rank: the number of axes; the other axes have size one.

        Raises:
            Unknown: `size` is known and larger than `LONGEST_RANGE`.
        """
        if isinstance(size, int) and size > LONGEST_RANGE:
            raise Unknown(f"it requires an axis of {size:,} elements, which is too long")
        if isinstance(size, int) and size <= MAX_COUNTING_LENGTH:
            return self.const(np.arange(size, dtype=np.int64).reshape([-1 if i == axis else 1 for i in range(rank)]))
        stop = self.const(size) if isinstance(size, int) else self.squeeze(size, [0])
        row = self.Range(self.const(0), stop, self.const(1))
        return self.unsqueeze(row, [i for i in range(rank) if i != axis])


def _single(value: float, dtype: int) -> onnx.TensorProto:
    """Return a tensor with one element."""
    return onnx.numpy_helper.from_array(np.full(1, value, onnx.helper.tensor_dtype_to_np_dtype(dtype)))
