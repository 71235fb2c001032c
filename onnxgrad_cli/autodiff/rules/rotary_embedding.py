"""Rule of rotary embeddings, which rotate pairs of numbers.

The adjoint of a rotation is the rotation by the opposite angle, so the operator itself computes the cotangent of its
input. The cotangents of the sine and cosine caches are computed from the separate numbers of the pairs.
Source: J. Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021, section 3.4.2.
"""

from __future__ import annotations

from onnxgrad_cli.autodiff.registry import rule
from onnxgrad_cli.autodiff.rules.index import gather
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val


@rule("RotaryEmbedding", needs_opset=23)
def rotary_embedding(
    op, g, y, x, cos_cache, sin_cache, position_ids, *, interleaved, num_heads, rotary_embedding_dim
):  # fmt: skip
    """A pair (a, b) becomes (cos a - sin b, sin a + cos b). The angle is the same for all heads of a token."""
    dx = op.RotaryEmbedding(
        g, cos_cache, -sin_cache, position_ids,
        interleaved=interleaved, num_heads=num_heads, rotary_embedding_dim=rotary_embedding_dim, types=[x.type],
    )  # fmt: skip
    if not op.wants(cos_cache) and not op.wants(sin_cache):
        return dx, None, None, None
    axis = 1 if x.rank == 4 else 2
    if x.rank == 3:
        x, g = split_heads(op, x, num_heads), split_heads(op, g, num_heads)
    half = op.size(cos_cache, -1)
    (a, b, _), (ga, gb, _) = (pairs(op, op.wide(v), half, interleaved, rotary_embedding_dim) for v in (x, g))

    def of_cache(cache: Val, product: Val) -> Val:
        by_token = op.cast(op.sum(product, [axis], keepdims=False), cache)
        return by_token if position_ids is None else gather(op, by_token, None, cache, position_ids, axis=0)[0]

    return dx, of_cache(cos_cache, a * ga + b * gb), of_cache(sin_cache, a * gb - b * ga), None


def pairs(op: Op, x: Val, half: int | Val, interleaved: int, rotated: int) -> tuple[Val, Val, Val | None]:
    """Split the last axis into the first numbers of all pairs, the second numbers, and the part that is not rotated.

    Args:
        op: the emitter.
        x: the tensor.
        half: the number of pairs.
        interleaved: True if the two numbers of a pair are neighbours. If False, the first number is in the first half
            and the second number in the second half.
        rotated: the number of elements of a head that are rotated; 0 means all.
    """
    rest, last = None, x.rank - 1
    lead, size = x.shape[:last], op.size(x, -1)
    count = half if isinstance(half, int) else None
    if rotated and size != rotated:
        left = size - rotated if isinstance(size, int) else op.Sub(size, op.ints([rotated]))
        x, rest = op.split(x, [rotated, left], axis=last)
        x, rest = op.state(x, (*lead, rotated)), op.state(rest, (*lead, left if isinstance(left, int) else None))
    if not interleaved:
        a, b = op.split(x, [half, half], axis=last)
        return op.state(a, (*lead, count)), op.state(b, (*lead, count)), rest
    x = op.Reshape(x, op.ints([0] * last + [-1, 2]), shape=(*lead, count, 2))
    a, b = (op.squeeze(v, [last + 1]) for v in op.split(x, [1, 1], axis=last + 1))
    return a, b, rest


def unpaired(op: Op, a: Val, b: Val, rest: Val | None, interleaved: int) -> Val:
    """Return the tensor that `pairs` splits into `a`, `b` and `rest`."""
    last = a.rank - 1
    if interleaved:
        both = op.Concat(op.unsqueeze(a, [last + 1]), op.unsqueeze(b, [last + 1]), axis=last + 1)
        x = op.Reshape(both, op.ints([0] * last + [-1]))
    else:
        x = op.Concat(a, b, axis=last)
    return x if rest is None else op.Concat(x, rest, axis=last)


def split_heads(op: Op, x: Val, count: int) -> Val:
    """Reshape [batch, tokens, heads x size] to [batch, tokens, heads, size]."""
    width = x.shape[2]
    size = width // count if isinstance(width, int) else f"{width}/{count}"
    return op.Reshape(x, op.ints([0, 0, count, -1]), shape=(*x.shape[:2], count, size))
