"""Where the boxes of a drawing go: layers from top to bottom, few crossings, short edges; groups from inside out.

A group is laid out for itself and is then one box of the group around it. Within a group the method is that of
K. Sugiyama, S. Tagawa and M. Toda (Methods for Visual Understanding of Hierarchical System Structures, IEEE
Transactions on Systems, Man, and Cybernetics 11, 1981): longest-path layers, barycentres for the order in a layer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from onnxgrad_cli.view.drawing import Box, Drawing, Edge, Group, Kind, Part

GAP, LAYER_GAP, PADDING, HEADING = 16.0, 36.0, 10.0, 16.0
"""Pixels between the boxes of a layer, between layers, inside a frame, and for a frame's title."""

LETTER = 6.2
"""Pixels of a letter in a frame's title."""

SWEEPS = 8

Point = tuple[float, float]
Size = tuple[float, float]
Pair = tuple[str, str]
Node = str | tuple[str, str, int]
"""A part by its key; or where an edge between two parts passes a layer."""


@dataclass(frozen=True)
class Place:
    """A rectangle: its upper left corner and its size, in pixels."""

    x: float
    y: float
    width: float
    height: float

    def moved(self, x: float, y: float) -> Place:
        """The same rectangle elsewhere."""
        return Place(self.x + x, self.y + y, self.width, self.height)

    @property
    def bottom(self) -> float:
        """The lower edge."""
        return self.y + self.height

    @property
    def middle(self) -> float:
        """The middle from left to right."""
        return self.x + self.width / 2

    @property
    def center(self) -> float:
        """The middle from top to bottom."""
        return self.y + self.height / 2


@dataclass(frozen=True)
class Route:
    """The points that an edge goes through, and whether it leaves and reaches boxes at their left and right."""

    edge: Edge
    points: list[Point]
    sideways: bool


@dataclass(frozen=True)
class Layout:
    """The place of every part by its key, and the routes of the edges in their order."""

    places: dict[str, Place]
    routes: list[Route]


@dataclass
class _Plan:
    """A group laid out for itself: the place of each part, and where edges pass layers on their way."""

    parts: dict[str, Place]
    passes: dict[Pair, list[Place]]


def layout(drawing: Drawing, size: Callable[[Box], Size]) -> Layout:
    """Lay out a drawing whose boxes have these sizes."""
    meetings = list(drawing.meetings())
    pairs: dict[str, dict[Pair, None]] = defaultdict(dict)
    for _, group, source, target in meetings:
        pairs[group.key][source.key, target.key] = None
    plans: dict[str, _Plan] = {}
    places: dict[str, Place] = {}
    passes: dict[tuple[str, Pair], list[Place]] = {}

    def measure(part: Part) -> Size:
        if isinstance(part, Box):
            return size(part)
        sizes = {inner.key: measure(inner) for inner in part.parts}
        plan = _beside(sizes) if part.beside else _layered(sizes, list(pairs[part.key]))
        plans[part.key] = _upside_down(plan) if part.kind == Kind.BACKWARD and not part.container else plan
        width = max((place.x + place.width for place in plan.parts.values()), default=0.0)
        height = max((place.bottom for place in plan.parts.values()), default=0.0)
        if not part.title:
            return width, height
        return max(width, LETTER * len(part.title)) + 2 * PADDING, height + HEADING + 2 * PADDING

    def put(part: Part, place: Place) -> None:
        places[part.key] = place
        if isinstance(part, Group):
            plan = plans[part.key]
            inner = (place.x + PADDING, place.y + PADDING + HEADING) if part.title else (place.x, place.y)
            for each in part.parts:
                put(each, plan.parts[each.key].moved(*inner))
            for pair, passed in plan.passes.items():
                passes[part.key, pair] = [spot.moved(*inner) for spot in passed]

    put(drawing.root, Place(0, 0, *measure(drawing.root)))
    routes = [
        _route(edge, places, passes.get((group.key, (a.key, b.key)), ()), group.beside)
        for edge, group, a, b in meetings
    ]
    return Layout(places, routes)


def _beside(sizes: Mapping[str, Size]) -> _Plan:
    """Parts in a row."""
    tallest = max(height for _, height in sizes.values())
    lefts = accumulate((width + 2 * GAP for width, _ in sizes.values()), initial=0.0)
    rows = zip(sizes.items(), lefts, strict=False)  # the last is where a further part would begin
    return _Plan({key: Place(x, (tallest - height) / 2, width, height) for (key, (width, height)), x in rows}, {})


def _upside_down(plan: _Plan) -> _Plan:
    """The same with the first layer at the bottom: what is computed backward flows up."""
    height = max((place.bottom for place in plan.parts.values()), default=0.0)

    def turned(place: Place) -> Place:
        return Place(place.x, height - place.bottom, place.width, place.height)

    parts = {key: turned(place) for key, place in plan.parts.items()}
    return _Plan(parts, {pair: list(map(turned, passed)) for pair, passed in plan.passes.items()})


# -- layers ---------------------------------------------------------------------------------------------------------


def _layered(sizes: Mapping[str, Size], pairs: Sequence[Pair]) -> _Plan:
    """Parts in layers, in the direction of the edges that go from a part to a later one."""
    graph = _LayerGraph(_ranks(list(sizes), pairs), pairs)
    _order(graph.layers, graph.above, graph.below)
    nodes = [node for layer in graph.layers for node in layer]
    widths = {node: sizes[node][0] if isinstance(node, str) else 2.0 for node in nodes}
    middles = _columns(graph.layers, graph.above, graph.below, widths)
    heights = [max(sizes[node][1] if isinstance(node, str) else 0.0 for node in layer) for layer in graph.layers]
    tops = list(accumulate((height + LAYER_GAP for height in heights), initial=0.0))
    rows = {node: row for row, layer in enumerate(graph.layers) for node in layer}

    def place(node: Node) -> Place:
        row = rows[node]
        height = sizes[node][1] if isinstance(node, str) else heights[row]
        return Place(middles[node] - widths[node] / 2, tops[row] + (heights[row] - height) / 2, widths[node], height)

    passes = {pair: list(map(place, chain)) for pair, chain in graph.chains.items()}
    return _Plan({key: place(key) for key in sizes}, passes)


class _LayerGraph:
    """Parts in layers, with a node in each layer that an edge passes, so that edges go from a layer to the next.

    Attributes:
        layers: the nodes of each layer, from top to bottom.
        above, below: node -> its neighbours in the layer above or below.
        chains: edge -> the nodes where it passes layers, from its source to its target.
    """

    def __init__(self, ranks: Mapping[str, int], pairs: Sequence[Pair]) -> None:
        self.layers: list[list[Node]] = [[] for _ in range(1 + max(ranks.values(), default=0))]
        self.above: dict[Node, list[Node]] = defaultdict(list)
        self.below: dict[Node, list[Node]] = defaultdict(list)
        self.chains: dict[Pair, list[Node]] = {}
        for key, rank in ranks.items():
            self.layers[rank].append(key)
        for a, b in pairs:
            upper, lower = sorted((a, b), key=ranks.__getitem__)
            between: list[Node] = [(a, b, rank) for rank in range(ranks[upper] + 1, ranks[lower])]
            for rank, node in enumerate(between, ranks[upper] + 1):
                self.layers[rank].append(node)
            if ranks[upper] < ranks[lower]:
                for one, other in pairwise([upper, *between, lower]):
                    self.below[one].append(other)
                    self.above[other].append(one)
            self.chains[a, b] = between if upper == a else between[::-1]
        self.layers = [layer for layer in self.layers if layer]  # a body may be empty


def _ranks(order: Sequence[str], pairs: Iterable[Pair]) -> dict[str, int]:
    """The layer of each part: below all it reads; what reads nothing is right above its first reader."""
    positions = {key: i for i, key in enumerate(order)}
    after: dict[str, list[str]] = defaultdict(list)
    for a, b in pairs:
        if positions[a] < positions[b]:
            after[a].append(b)
    ranks = dict.fromkeys(order, 0)
    for key in order:
        for reader in after[key]:
            ranks[reader] = max(ranks[reader], ranks[key] + 1)
    for key in order:
        if ranks[key] == 0 and after[key]:
            ranks[key] = min(ranks[reader] for reader in after[key]) - 1
    lowest = min(ranks.values(), default=0)
    return {key: rank - lowest for key, rank in ranks.items()}


def _order(layers: list[list[Node]], above: Mapping[Node, list[Node]], below: Mapping[Node, list[Node]]) -> None:
    """Sort each layer by where its neighbours stand, down and up again."""
    positions = {node: i for layer in layers for i, node in enumerate(layer)}
    for sweep in range(SWEEPS):
        neighbours = below if sweep % 2 else above
        for layer in layers[::-1] if sweep % 2 else layers:
            layer.sort(
                key=lambda node: _mean([positions[other] for other in neighbours.get(node, ())], positions[node])
            )
            positions.update((node, i) for i, node in enumerate(layer))


def _columns(
    layers: Sequence[Sequence[Node]],
    above: Mapping[Node, list[Node]],
    below: Mapping[Node, list[Node]],
    widths: Mapping[Node, float],
) -> dict[Node, float]:
    """The middle of each part from left to right: near its neighbours, in the order of its layer."""
    gaps = [[(widths[a] + widths[b]) / 2 + GAP for a, b in pairwise(layer)] for layer in layers]
    middles: dict[Node, float] = {}
    for layer, between in zip(layers, gaps, strict=True):
        starts = list(accumulate(between, initial=0.0))
        middles.update((node, x - starts[-1] / 2) for node, x in zip(layer, starts, strict=True))
    for sweep in range(SWEEPS):
        neighbours = below if sweep % 2 else above
        for layer, between in list(zip(layers, gaps, strict=True))[:: -1 if sweep % 2 else 1]:
            wanted = [_mean([middles[other] for other in neighbours.get(node, ())], middles[node]) for node in layer]
            middles.update(zip(layer, _apart(wanted, between), strict=True))
    left = min((middles[node] - widths[node] / 2 for node in middles), default=0.0)
    return {node: x - left for node, x in middles.items()}


def _apart(wanted: Sequence[float], gaps: Sequence[float]) -> list[float]:
    """The positions nearest to those wanted, in the mean square, that keep the order and these gaps.

    Less the gaps before them they only have to rise, which is isotonic regression: neighbours that fall are pooled
    (R. Barlow et al., Statistical Inference under Order Restrictions, 1972).
    """
    starts = list(accumulate(gaps, initial=0.0))
    pools: list[tuple[float, int]] = []  # sum and number
    for x, start in zip(wanted, starts, strict=True):
        pools.append((x - start, 1))
        while len(pools) > 1 and pools[-2][0] / pools[-2][1] > pools[-1][0] / pools[-1][1]:
            (a, m), (b, n) = pools[-2:]
            pools[-2:] = [(a + b, m + n)]
    means = [total / number for total, number in pools for _ in range(number)]
    return [mean + start for mean, start in zip(means, starts, strict=True)]


def _mean(values: Sequence[float], default: float) -> float:
    return sum(values) / len(values) if values else default


# -- edges ----------------------------------------------------------------------------------------------------------


def _route(edge: Edge, places: Mapping[str, Place], passed: Sequence[Place], beside: bool) -> Route:
    """From the side of the source that faces the target, through the layers between, to the side that faces back."""
    source, target = places[edge.source], places[edge.target]
    down = passed[0].y > source.y if passed else source.bottom <= target.y
    up = passed[0].y < source.y if passed else target.bottom <= source.y
    if beside or not (down or up):
        right = source.middle <= target.middle
        start = (source.x + source.width if right else source.x, source.center)
        return Route(edge, [start, (target.x if right else target.x + target.width, target.center)], True)
    way = [(spot.middle, y) for spot in passed for y in ((spot.y, spot.bottom) if down else (spot.bottom, spot.y))]
    start, end = (
        (source.middle, source.bottom if down else source.y),
        (target.middle, target.y if down else target.bottom),
    )
    return Route(edge, [start, *way, end], False)
