"""Mutations of bytes, whatever they mean."""

from __future__ import annotations

from random import Random


def mutate(data: bytes, rng: Random, other: bytes = b"") -> tuple[bytes, str]:
    """Change bytes in one way, with pieces of other bytes; returns them, and what was done."""
    if not data:
        return rng.randbytes(rng.randrange(1, 64)), "random bytes"
    where, how = rng.randrange(len(data)), rng.choice((*WAYS, "flip", "flip", "overwrite"))
    return WAYS[how](data, where, rng, other), f"{how} at byte {where} of {len(data)}"


def _span(data: bytes, where: int, rng: Random) -> int:
    return min(len(data), where + rng.choice((1, 2, 4, 8, 64, 1000)))


WAYS = {
    "flip": lambda d, w, rng, other: d[:w] + bytes([d[w] ^ 1 << rng.randrange(8)]) + d[w + 1 :],
    "overwrite": lambda d, w, rng, other: (
        d[:w] + bytes([rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))]) + d[w + 1 :]
    ),
    "cut": lambda d, w, rng, other: d[:w],
    "behead": lambda d, w, rng, other: d[w:],
    "remove": lambda d, w, rng, other: d[:w] + d[_span(d, w, rng) :],
    "repeat": lambda d, w, rng, other: d[:w] + d[w : _span(d, w, rng)] * 2 + d[_span(d, w, rng) :],
    "insert": lambda d, w, rng, other: d[:w] + rng.randbytes(rng.choice((1, 2, 4, 8, 64))) + d[w:],
    "varint": lambda d, w, rng, other: d[:w] + b"\xff" * rng.randrange(1, 10) + b"\x01" + d[w + 1 :],
    "splice": lambda d, w, rng, other: d[:w] + other[rng.randrange(len(other) + 1) :],
    "zero": lambda d, w, rng, other: d[:w] + bytes(_span(d, w, rng) - w) + d[_span(d, w, rng) :],
}
