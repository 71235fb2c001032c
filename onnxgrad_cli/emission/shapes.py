"""`ShapeOps`: shapes, and what changes the shape of a value alone; what is static is decided here, at build time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx

from onnxgrad_cli.emission.nodes import NodeEmitter
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.errors import Unknown

LONGEST = 1 << 24
"""Numbers up to which a row of them is a constant, and elements up to which there are windows: few bytes may ask for
billions."""

LONGEST_RANGE = 1 << 26
"""Numbers up to which a row of them is a Range of constants: onnx computes that where it infers shapes. Beyond half a
gigabyte it runs out of the memory that it is given, and now and then dies of that."""


class ShapeOps(NodeEmitter):
    """Shorthands for shapes. A size is an int where it is static, else an int64 vector of one element."""

    # -- what shape a value has -----------------------------------------------------------------------------

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

    def same_shape(self, a: Val, b: Val) -> bool:
        """Whether two values surely have one shape: equal sizes or equal symbols on every axis."""
        return a._shape is not None and a._shape == b._shape and "?" not in a._shape

    def vector(self, parts: Sequence[int | Val]) -> Val:
        """An int64 vector of ints and int64 vectors, one after the other."""
        if all(isinstance(part, int) for part in parts):
            return self.ints(parts)  # type: ignore[arg-type]
        return self.Concat(*(p if isinstance(p, Val) else self.ints([p]) for p in parts), axis=0)

    # -- the same elements in another shape -----------------------------------------------------------------

    def reshape(self, x: Val, dims: Sequence[int | Val]) -> Val:
        """`x` in the given dimensions: ints (-1 at most once, no 0 by position) or one-element int64 vectors."""
        if all(isinstance(dim, int) for dim in dims):
            if x.known_shape == tuple(dims):
                return x
            literal = self._literal_zeros() if 0 in dims and -1 not in dims else None
            if 0 in dims and -1 not in dims and literal is None:  # there is nothing in it that could be laid out
                return self.zeros(dims, x)
            return self.Reshape(x, self.ints(dims), allowzero=literal)  # type: ignore[arg-type]
        shape = [dim if isinstance(dim, int) and dim > 0 else None for dim in dims]
        literal = None if -1 in [dim for dim in dims if isinstance(dim, int)] else self._literal_zeros()
        return self.Reshape(x, self.vector(dims), allowzero=literal, shape=shape)

    def reshape_like(self, x: Val, like: Val) -> Val:
        """`x` in the shape of `like`, without reading `like` at run time where its symbols can be had from `x`."""
        if self.same_shape(x, like):
            return x
        dims, shape = self._dims_like(x, like), like.known_shape
        if dims:
            return self.Reshape(x, self.ints(dims), shape=shape)
        if shape is not None and 0 in shape and all(isinstance(dim, int) for dim in shape):
            return self.reshape(x, shape)  # type: ignore[arg-type]
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

    # -- tensors made from a shape --------------------------------------------------------------------------

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
        """0, 1, ... below `size` (an int, or a one-element int64 vector) along `axis` of `rank` axes; int64.

        Raises:
            Unknown: `size` is known, and no model can hold so many.
        """
        if isinstance(size, int) and size > LONGEST_RANGE:
            raise Unknown(f"its {size:,} places along an axis are too many")
        if isinstance(size, int) and size <= LONGEST:
            return self.const(np.arange(size, dtype=np.int64).reshape([-1 if i == axis else 1 for i in range(rank)]))
        stop = self.const(size) if isinstance(size, int) else self.squeeze(size, [0])
        row = self.Range(self.const(0), stop, self.const(1))
        return self.unsqueeze(row, [i for i in range(rank) if i != axis])
