"""Rules of operators that move elements without changing them. The gradient moves cotangents back."""

from __future__ import annotations

from typing import Any

from onnxgrad_cli.autodiff.registry import formula_rule, no_gradient, rule
from onnxgrad_cli.ir.types import is_float

no_gradient("Constant RandomNormal RandomNormalLike RandomUniform RandomUniformLike Multinomial Bernoulli")


formula_rule("Identity", lambda op, g, y, x: g)
formula_rule("Expand", lambda op, g, y, x, shape: (g, None))
formula_rule("Trilu", lambda op, g, y, x, k, *, upper: (op.Trilu(g, k, upper=upper), None))


@rule("Cast")
def cast(op, g, y, x, *, to, saturate, round_mode):
    """The rounding of a Cast has the gradient of the identity. Integers get no gradient."""
    return op.cast(g, x) if is_float(x.type) else None


@rule("CastLike")
def cast_like(op, g, y, x, like, *, saturate, round_mode):
    return (op.cast(g, x) if is_float(x.type) else None), None


@rule("Reshape Flatten")
def reshape(op, g, y, x, shape, *, allowzero, axis):
    return op.reshape_like(g, x), None


@rule("Squeeze Unsqueeze")
def squeeze(op, g, y, x, axes):
    if axes is not None and axes.const is not None and axes.const.size:
        inverse = {"Squeeze": "Unsqueeze", "Unsqueeze": "Squeeze"}[op.node.op_type]
        return op.emit(inverse, g, axes, shape=x.known_shape), None
    return op.reshape_like(g, x), None


@rule("Transpose")
def transpose(op, g, y, x, *, perm):
    if perm is None:
        return op.Transpose(g)
    return op.transpose(g, sorted(range(len(perm)), key=perm.__getitem__))


@rule("Tile")
def tile(op, g, y, x, repeats):
    """Each axis of y is a sequence of copies of the axis of x. The cotangent is summed over the copies."""
    if repeats.const is None:
        pairs = op.Concat(op.unsqueeze(repeats, [1]), op.unsqueeze(op.shape(x), [1]), axis=1)
        dims = op.Reshape(pairs, op.ints([-1]))
        copies = op.Reshape(g, dims, allowzero=int(op.opset >= 14) or None, shape=[None] * (2 * x.rank))
        return op.state(op.sum(copies, range(0, 2 * x.rank, 2), keepdims=False), x.shape), None
    parts: list[Any] = []
    axes: list[int] = []
    for axis, count in enumerate(repeats.const.tolist()):
        if count != 1:
            axes.append(len(parts))
            parts.append(count)
        parts.append(op.size(x, axis))
    if 0 in parts:
        return None, None
    return (op.state(op.sum(op.reshape(g, parts), axes, keepdims=False), x.shape) if axes else g), None


@rule("Concat")
def concat(op, g, y, *xs, axis):
    axis %= g.rank
    sizes = [op.size(x, axis) for x in xs]
    wanted = [op.wants(x) for x in xs]
    if wanted.count(True) == 1 and all(isinstance(size, int) for size in sizes):
        start = sum(sizes[: wanted.index(True)])
        end = start + sizes[wanted.index(True)]
        piece = op.Slice(g, op.ints([start]), op.ints([end]), op.ints([axis]))
        return [piece if want else None for want in wanted]
    pieces = op.split(g, sizes, axis)
    return [op.state(piece, x.shape) for piece, x in zip(pieces, xs, strict=True)]


@rule("Split")
def split(op, gs, ys, x, split, *, axis, num_outputs):
    """The cotangent is the concatenation of the outputs' cotangents, with zeros for an output that has none."""
    axis %= x.rank
    present = [i for i, g in enumerate(gs) if g is not None]
    sizes = _sizes(op, ys, x, split, axis)
    if len(present) == 1 and all(isinstance(size, int) for size in sizes):
        before, after = sum(sizes[: present[0]]), sum(sizes[present[0] + 1 :])
        pads = [0] * (2 * x.rank)
        pads[axis], pads[axis + x.rank] = before, after
        return op.Pad(gs[present[0]], op.ints(pads), shape=x.shape), None
    parts = []
    for g, piece, size in zip(gs, ys, sizes, strict=True):
        if g is None and piece is not None:
            g = op.fill(0.0, piece)
        elif g is None:
            g = op.zeros([size if a == axis else op.size(x, a) for a in range(x.rank)], x)
        parts.append(g)
    return op.Concat(*parts, axis=axis, shape=x.shape), None


def _sizes(op, ys, x, split, axis):
    """Return the sizes of the outputs along `axis`, each as an int or a one-element vector."""
    if split is not None and split.const is not None:
        return split.const.tolist()
    size, count = x.shape[axis], len(ys)
    if split is None and isinstance(size, int):
        chunk = -(-size // count)
        return [min(chunk, size - chunk * i) for i in range(count)]
    if split is None and None in ys:
        whole = op.dim(x, axis)
        chunk = op.Div(whole + (count - 1), op.ints([count]))
        return [*([chunk] * (count - 1)), whole - chunk * (count - 1)]
    if split is None:
        return [op.dim(y, axis) for y in ys]
    return [op.Slice(split, op.ints([i]), op.ints([i + 1])) for i in range(count)]


@rule("DepthToSpace")
def depth_to_space(op, g, y, x, *, blocksize, mode):
    if mode == "DCR":
        return op.SpaceToDepth(g, blocksize=blocksize)
    batch, depth, height, width = op.sizes(x, range(4))
    channels = depth // blocksize**2 if isinstance(depth, int) else op.dim(g, 1)
    blocks = op.reshape(g, [batch, channels, height, blocksize, width, blocksize])
    return op.reshape_like(op.transpose(blocks, [0, 1, 3, 5, 2, 4]), x)


@rule("SpaceToDepth")
def space_to_depth(op, g, y, x, *, blocksize, mode="DCR"):
    """Apply DepthToSpace to `g` in the same mode. Before opset 28, SpaceToDepth has only the mode DCR."""
    return op.DepthToSpace(g, blocksize=blocksize, **({} if mode == "DCR" else {"mode": mode}))


@rule("Range")
def range_(op, g, y, start, limit, delta, *, stash_type):
    """y[i] = start + i delta. `limit` only determines the number of elements, so it has no derivative."""
    g = op.wide(g)
    steps = op.Range(op.const(0), op.Size(g), op.const(1))
    total, weighted = op.sum(g, keepdims=False), op.sum(g * op.cast(steps, g), keepdims=False)
    return op.cast(total, start), None, op.cast(weighted, delta)


@rule("CenterCropPad")
def center_crop_pad(op, g, y, x, shape, *, axes):
    """Apply CenterCropPad to `g` with the shape of x: it crops padded axes and pads cropped axes by equal amounts."""
    sizes = op.shape(x) if axes is None else op.vector(op.sizes(x, axes))
    return op.state(op.CenterCropPad(g, sizes, axes=axes), x.known_shape), None
