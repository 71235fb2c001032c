"""The layers of a network, found by what repeats: the operators of one layer follow each other as those of the next do.

Exporters write a network layer after layer, whatever they call the nodes, and definitions replace nodes where they
stand. So the longest part of the graph that repeats itself is its layers. Where an exporter has left out of later
layers what they share with the first, nothing repeats; then the modules tell that the nodes are from, layers.0 and so
on.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from onnxgrad_cli.ir.modules import modules_around
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.nodes import reads

NUMBERED = re.compile(r"(.*?)(\d{1,9})")
"""The path of a module that is one of several, and its number."""

SHARE = 3
"""Layers are at least one in so many of the nodes: what repeats besides them is no layer."""

LONGEST = 4096
"""Nodes of a layer at most: what is longer is not looked for, as each length is tried."""


def ends_of_layers(nodes: Sequence[Node]) -> list[int]:
    """The positions in `nodes` at which layers begin, and at which the last one has ended; none if there are no layers.

    Of all positions within a layer that repeats it is that one which the fewest values cross.

    Args:
        nodes: the forward part, in order.
    """
    start, length, count = _longest_repetition(nodes)
    if count < 2 or SHARE * length * count < len(nodes):
        return _ends_of_modules(nodes)
    shift = _narrowest(nodes, start + count // 2 * length, length)
    return [at for at in range(start + shift, len(nodes), length) if at <= start + length * count]


def _ends_of_modules(nodes: Sequence[Node]) -> list[int]:
    """Where the first of the modules that are numbered alike begins, and where each of them ends."""
    found: dict[str, dict[int, list[int]]] = {}
    for at, node in enumerate(nodes):
        for path in modules_around(node):
            if numbered := NUMBERED.fullmatch(path):
                found.setdefault(numbered[1], {}).setdefault(int(numbered[2]), []).append(at)
    several = [layers for layers in found.values() if len(layers) > 1]
    most = max(several, key=lambda layers: sum(map(len, layers.values())), default={})
    if not most or SHARE * sum(map(len, most.values())) < len(nodes):
        return []
    return sorted({min(map(min, most.values())), *(max(layer) + 1 for layer in most.values())})


def _longest_repetition(nodes: Sequence[Node]) -> tuple[int, int, int]:
    """Where the longest repetition begins, how many nodes it repeats, and how often; the shortest of equal ones."""
    kinds: dict[tuple[str, str, int, int], int] = {}
    keys = ((node.domain, node.op_type, len(node.input), len(node.output)) for node in nodes)
    codes = np.array([kinds.setdefault(key, len(kinds)) for key in keys], np.int64)
    best, covered = (0, 1, 0), 0
    for length in range(1, min(len(codes) // 2, LONGEST) + 1):
        start, run = _longest_run(codes[length:] == codes[:-length])
        count = (run + length) // length
        if count > 1 and count * length > covered:
            best, covered = (start, length, count), count * length
    return best


def _longest_run(same: np.ndarray) -> tuple[int, int]:
    """Where the longest run of True begins, and how long it is."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], same, [False]]).astype(np.int8)))
    if not edges.size:
        return 0, 0
    begins, lengths = edges[::2], edges[1::2] - edges[::2]
    at = int(lengths.argmax())
    return int(begins[at]), int(lengths[at])


def _narrowest(nodes: Sequence[Node], first: int, length: int) -> int:
    """How far behind `first` the position lies that the fewest values of the `length` nodes before it cross."""
    last_read: dict[str, int] = {}
    for at, node in enumerate(nodes):
        last_read.update(dict.fromkeys(reads(node), at))

    def crossing(cut: int) -> int:
        made = (name for node in nodes[max(cut - length, 0) : cut] for name in node.output)
        return sum(last_read.get(name, -1) >= cut for name in made)

    return min(range(length), key=lambda shift: crossing(min(first + shift, len(nodes))))
