"""Fold large drawings: the nodes of a module become one box that shows their number.

Modules come from the scopes that exporters store in the metadata, in node names or in weight names. In a model without
scopes, chains of nodes without branches are folded. If there are still too many boxes, neighboring nodes are folded, in
groups of equal size. A unit is folded as a whole: a node with its bodies and the nodes of its gradient.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from onnxgrad_cli.common.escape import escaped
from onnxgrad_cli.view.drawing import Box, BoxKind, Cluster, Drawing, Edge, Part, boxes, connected, is_value, short

SHOWN = 4
"""Largest number of operators, and of outputs, that the text of a folded box lists."""

STAYING = frozenset({BoxKind.INPUT, BoxKind.OUTPUT})
"""Kinds of values that always keep their own box."""

Key = tuple[str, ...] | int


def fold(drawing: Drawing, limit: int = 150, depth: int | None = None) -> Drawing:
    """Return a folded drawing.

    Args:
        drawing: the drawing of the whole model.
        limit: the largest number of boxes for nodes. The folding with the most detail within this limit is chosen. 0
            means no limit.
        depth: the nesting depth of the modules that are folded. It is used instead of `limit`.
    """
    if depth is None and (not limit or count(drawing.root) <= limit):
        return drawing
    folding = _Folding(drawing, limit, depth)
    return folding.drawing(folding.container(drawing.root))


def count(part: Part) -> int:
    """Return the number of boxes in a part that represent nodes."""
    return sum(box.nodes > 0 for box in boxes(part))


class _Folding:
    def __init__(self, drawing: Drawing, limit: int, depth: int | None) -> None:
        self.old = drawing
        self.limit = limit
        self.depth = depth
        self.became: dict[str, str] = {}  # key of a box -> key of the box that it was folded into
        self.ends = {edge.target for edge in drawing.edges}

    def container(self, group: Cluster) -> Cluster:
        """Return a graph in which units are folded. Bodies that are too large are folded before their outer graph."""
        values = [part for part in group.parts if is_value(part)]
        units = [self.within(part) for part in group.parts if not is_value(part)]
        merged: dict[Key, list[Part]] = defaultdict(list)
        for unit, key in zip(units, self.keys(units), strict=True):
            merged[key].append(unit)
        folded = [self.merge(key, found) for key, found in merged.items()]
        first = [value for value in values if value.key not in self.ends]
        last = [value for value in values if value.key in self.ends]
        return replace(group, parts=(*first, *folded, *last))

    def within(self, part: Part) -> Part:
        if isinstance(part, Box):
            return part
        if part.container and (self.depth is not None or count(part) > self.limit):
            return self.container(part)
        return replace(part, parts=tuple(map(self.within, part.parts)))

    # -- grouping ---------------------------------------------------------------------------------------------------

    def keys(self, units: Sequence[Part]) -> Sequence[Key]:
        """Return a key for each unit. Units with equal keys are folded together."""
        if self.depth is not None:
            return _by_module(units, self.depth)
        for depth in range(max((len(unit.scope) for unit in units), default=0), 0, -1):
            keys = _by_module(units, depth)
            if _folded_count(units, keys) <= self.limit:
                return keys
        keys, size = self.by_chain(units), 1
        while _folded_count(units, keys) > self.limit and size < len(units):
            size *= 2
            keys = [i // size for i in range(len(units))]
        return keys

    def by_chain(self, units: Sequence[Part]) -> list[Key]:
        """Return a key for each unit. Units of the same chain get equal keys.

        In a chain, each unit has one reader and reads from one unit. An edge counts only if both its nodes have the
        kind of the first node of their unit, such as forward nodes.
        """
        home = {box.key: i for i, unit in enumerate(units) for box in boxes(unit)}
        kinds = [next(boxes(unit)).kind for unit in units]
        before: dict[int, set[int]] = defaultdict(set)
        after: dict[int, set[int]] = defaultdict(set)
        for edge in self.old.edges:
            a, b = home.get(edge.source), home.get(edge.target)
            ends = {self.old.boxes[edge.source].kind, self.old.boxes[edge.target].kind}
            if a is not None and b is not None and a != b and ends == {kinds[a]} == {kinds[b]}:
                after[a].add(b)
                before[b].add(a)
        keys: list[Key] = list(range(len(units)))
        for i in range(len(units)):
            if len(before[i]) == 1 and len(after[source := min(before[i])]) == 1 and source < i:
                keys[i] = keys[source]
        return keys

    # -- merging ----------------------------------------------------------------------------------------------------

    def merge(self, key: Key, units: Sequence[Part]) -> Part:
        """Return one part for units with the same key. Several units become one box for each kind of node in them."""
        if len(units) == 1:
            return self.without_gradient(units[0])
        inside = [box for unit in units for box in boxes(unit)]
        kinds: dict[BoxKind, list[Box]] = defaultdict(list)
        for box in filter(_is_node, inside):
            kinds[_folded_kind(box)].append(box)
        title = _title(key, inside)
        titles = dict.fromkeys(kinds, title)
        if any(isinstance(unit, Cluster) for unit in units):
            titles[BoxKind.BACKWARD] = f"gradient of {title}"
        folded = tuple(self.box(kind, titles[kind], found) for kind, found in kinds.items())
        self.became.update((box.key, folded[0].key) for box in filter(is_value, inside))
        return folded[0] if len(folded) == 1 else Cluster(f"u{folded[0].key}", "", None, folded, beside=True)

    def without_gradient(self, unit: Part) -> Part:
        """Return a unit that is not folded itself. Only the nodes of its gradient become one box."""
        if isinstance(unit, Box):
            return unit
        if _is_gradient(unit):
            return self.box(BoxKind.BACKWARD, unit.title, list(boxes(unit)))
        return replace(unit, parts=tuple(map(self.without_gradient, unit.parts))) if unit.beside else unit

    def box(self, kind: BoxKind, title: str, found: Sequence[Box]) -> Box:
        self.became.update((box.key, found[0].key) for box in found)
        nodes = sum(box.nodes for box in found)
        operators = [f"{number} {name}" for name, number in Counter(box.title for box in found).most_common()]
        others = len(operators) - SHOWN
        more = [f"{others} other operator{'s' * (others > 1)}"] if others > 0 else []
        lines = (f"{nodes} node{'s' * (nodes > 1)}", *operators[:SHOWN], *more)
        return Box(found[0].key, kind, title, lines, "\n".join(operators), nodes)

    def drawing(self, root: Cluster) -> Drawing:
        """Return the drawing with the folded root and the edges between its boxes.

        A value that is connected to a single folded part has no box. Instead, the box of that part lists the number of
        such values.
        """
        tensors: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
        for edge in self.old.edges:
            ends = (self.now(edge.source), self.now(edge.target))
            if ends[0] != ends[1]:
                tensors[ends].update(dict.fromkeys(edge.tensors))
        hosts = self.hosts(root, tensors)
        counts: dict[str, Counter[BoxKind]] = defaultdict(Counter)
        for value, host in hosts.items():
            counts[host][self.old.boxes[value].kind] += 1
        edges = [Edge(*ends, tuple(names)) for ends, names in tensors.items() if not hosts.keys() & set(ends)]
        made: dict[str, dict[str, None]] = {key: {} for key in self.became.values()}
        for edge in edges:
            if edge.source in made:
                made[edge.source].update(dict.fromkeys(edge.tensors))
        return replace(self.old, root=_finished(root, hosts, counts, made), edges=tuple(edges))

    def now(self, key: str) -> str:
        """Return the key of the box into which a box was folded. A box in a body may have been folded several times."""
        while (other := self.became.get(key, key)) != key:
            key = other
        return key

    def hosts(self, root: Cluster, ends: Iterable[tuple[str, str]]) -> dict[str, str]:
        """Return key of a hidden value -> key of the first folded box to which it is connected.

        A value is hidden if it is connected to a single part and that part is folded. Inputs and outputs of the model
        are never hidden.
        """
        containers = (group for group in root.groups() if group.container)
        unit = {box.key: part.key for group in containers for part in group.parts for box in boxes(part)}
        folded = set(self.became.values())
        return {
            key: found[0]
            for key, found in connected(ends).items()
            if not self.old.boxes[key].nodes
            and self.old.boxes[key].kind not in STAYING
            and len({unit[other] for other in found}) == 1
            and folded.issuperset(found)
        }


def _title(key: Key, inside: Sequence[Box]) -> str:
    """Return the title of a folded box: the name of the module, or the names of the first and the last node."""
    if isinstance(key, tuple):
        return escaped(key[-1])
    titles = [box.title for box in inside if box.nodes]
    return f"{titles[0]} … {titles[-1]}"


def _folded_kind(box: Box) -> BoxKind:
    return BoxKind.FORWARD if box.kind == BoxKind.CONSTANT else box.kind


def _is_gradient(part: Part) -> bool:
    """Return True if a part is the frame around the nodes of a gradient, and none of these nodes has a body."""
    return isinstance(part, Cluster) and not part.container and not part.beside and all(map(_is_node, part.parts))


def _is_node(part: Part) -> bool:
    return isinstance(part, Box) and part.nodes > 0


def _by_module(units: Sequence[Part], depth: int) -> list[Key]:
    return [unit.scope[:depth] or i for i, unit in enumerate(units)]


def _folded_count(units: Sequence[Part], keys: Sequence[Key]) -> int:
    """Return the number of boxes for nodes after folding the units that have equal keys."""
    alone = Counter(keys)
    kinds = {(key, _folded_kind(box)) for u, key in zip(units, keys, strict=True) for box in boxes(u) if box.nodes}
    whole = sum(_count_alone(unit) for unit, key in zip(units, keys, strict=True) if alone[key] == 1)
    return whole + sum(alone[key] > 1 for key, _ in kinds)


def _count_alone(unit: Part) -> int:
    if isinstance(unit, Cluster) and unit.beside:
        return sum(map(_count_alone, unit.parts))
    return 1 if _is_gradient(unit) else count(unit)


def _finished(
    group: Cluster, hidden: dict[str, str], counts: dict[str, Counter[BoxKind]], made: dict[str, dict[str, None]]
) -> Cluster:
    """Return a group without hidden values. Each folded box gets text lines about its hidden values and its outputs."""

    def finish(part: Part) -> Part:
        if isinstance(part, Cluster):
            return _finished(part, hidden, counts, made)
        if part.key not in made:
            return part
        within = [f"{n} {kind}{'s' * (n > 1)}" for kind, n in counts.get(part.key, Counter()).items()]
        out = list(map(short, made[part.key]))
        more = [f"and {len(out) - SHOWN} more"] if len(out) > SHOWN else []
        return replace(part, lines=(*part.lines, *within, *out[:SHOWN], *more), makes=len(out))

    return replace(group, parts=tuple(finish(part) for part in group.parts if part.key not in hidden))
