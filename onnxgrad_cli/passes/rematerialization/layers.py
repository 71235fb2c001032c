"""Find the layers of a network: the longest part of the graph in which the same sequence of operators repeats.

Exporters write a network layer after layer, whatever the names of the nodes are, and expanding definitions does not
change the order. But an exporter may compute values that all layers share only once, in the first layer. Later layers
then lack these nodes, and nothing repeats. In this case, layers are found by the module paths of the nodes, such as
layers.0.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from onnxgrad_cli.ir.modules import modules_around
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.node_values import reads

NUMBERED = re.compile(r"(.*?)(\d{1,9})")
"""Pattern of the path of a numbered module: the part before the number, and the number."""

SHARE = 3
"""Layers must contain at least 1 / SHARE of all nodes. A smaller repetition does not count as layers."""

MAX_LAYER_NODES = 4096
"""Largest number of nodes of a layer. Longer ones are not searched for, because each length has to be tried."""


def ends_of_layers(nodes: Sequence[Node]) -> list[int]:
    """Return the positions in `nodes` at which layers begin, and the end of the last layer; [] if there are no layers.

    A layer may be taken to begin at any of the repeated nodes. The position is chosen across which the fewest values
    are passed on.

    Args:
        nodes: the forward part, in order.
    """
    start, length, count = _longest_repetition(nodes)
    if count < 2 or SHARE * length * count < len(nodes):
        return _ends_of_modules(nodes)
    shift = _narrowest(nodes, start + count // 2 * length, length)
    return [at for at in range(start + shift, len(nodes), length) if at <= start + length * count]


def _ends_of_modules(nodes: Sequence[Node]) -> list[int]:
    """Return the position where the first of several numbered modules begins, and the end of each of these modules."""
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
    """Return start, length (in nodes) and count of the longest repetition. Ties go to the shorter length."""
    kinds: dict[tuple[str, str, int, int], int] = {}
    keys = ((node.domain, node.op_type, len(node.input), len(node.output)) for node in nodes)
    codes = np.array([kinds.setdefault(key, len(kinds)) for key in keys], np.int64)
    best, covered = (0, 1, 0), 0
    for length in range(1, min(len(codes) // 2, MAX_LAYER_NODES) + 1):
        start, run = _longest_run(codes[length:] == codes[:-length])
        count = (run + length) // length
        if count > 1 and count * length > covered:
            best, covered = (start, length, count), count * length
    return best


def _longest_run(same: np.ndarray) -> tuple[int, int]:
    """Return the start and the length of the longest run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], same, [False]]).astype(np.int8)))
    if not edges.size:
        return 0, 0
    begins, lengths = edges[::2], edges[1::2] - edges[::2]
    at = int(lengths.argmax())
    return int(begins[at]), int(lengths[at])


def _narrowest(nodes: Sequence[Node], first: int, length: int) -> int:
    """Return the distance from `first` to the position across which the fewest values are passed on.

    Positions less than `length` after `first` are compared. Only values computed by the `length` nodes before a
    position are counted.
    """
    last_read: dict[str, int] = {}
    for at, node in enumerate(nodes):
        last_read.update(dict.fromkeys(reads(node), at))

    def crossing(cut: int) -> int:
        made = (name for node in nodes[max(cut - length, 0) : cut] for name in node.output)
        return sum(last_read.get(name, -1) >= cut for name in made)

    return min(range(length), key=lambda shift: crossing(min(first + shift, len(nodes))))
