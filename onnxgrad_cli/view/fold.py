"""Make a large drawing small enough to be looked at: nodes of one module become one box, which says how many.

Modules are known by the scopes that exporters leave, in metadata, in names of nodes or in those of weights. Where
there are none, chains of nodes without branches are folded, and if that does not do, runs of neighbours.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from onnxgrad_cli.common.visible import visible
from onnxgrad_cli.view.drawing import Box, Drawing, Edge, Group, Kind, Part, boxes, short

SHOWN = 4
"""Operators that a folded box names."""

STAYING = frozenset({Kind.INPUT, Kind.OUTPUT})
"""Kinds of values that are never folded."""

Key = tuple[str, ...] | int


def fold(drawing: Drawing, limit: int = 150, depth: int | None = None) -> Drawing:
    """Fold a drawing.

    Args:
        drawing: the whole model.
        limit: how many boxes may stand for nodes; the finest folding that keeps to it is chosen. 0: any number.
        depth: fold at this depth of the modules instead.
    """
    if depth is None and (not limit or count(drawing.root) <= limit):
        return drawing
    folding = _Folding(drawing, limit, depth)
    return folding.drawing(folding.container(drawing.root))


def count(part: Part) -> int:
    """How many boxes of a part stand for nodes."""
    return sum(box.nodes > 0 for box in boxes(part))


class _Folding:
    def __init__(self, drawing: Drawing, limit: int, depth: int | None) -> None:
        self.old = drawing
        self.limit = limit
        self.depth = depth
        self.became: dict[str, str] = {}  # box -> the box it went into
        self.ends = {edge.target for edge in drawing.edges}

    def container(self, group: Group) -> Group:
        """A graph with its units folded, after the bodies inside it that are too large themselves."""
        values = [part for part in group.parts if _is_value(part)]
        units = [self.within(part) for part in group.parts if not _is_value(part)]
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

    # -- what goes together -----------------------------------------------------------------------------------------

    def keys(self, units: Sequence[Part]) -> Sequence[Key]:
        """A key for each unit; those of one key become one."""
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
        """Units go together along each chain in which everyone has one reader and reads from one."""
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

    # -- what becomes of them ---------------------------------------------------------------------------------------

    def merge(self, key: Key, units: Sequence[Part]) -> Part:
        """One part for several units: a box for each kind of node in them."""
        if len(units) == 1:
            return self.without_gradient(units[0])
        inside = [box for unit in units for box in boxes(unit)]
        kinds: dict[Kind, list[Box]] = defaultdict(list)
        for box in filter(_is_node, inside):
            kinds[_folded_kind(box)].append(box)
        title = _title(key, inside)
        titles = dict.fromkeys(kinds, title)
        if any(isinstance(unit, Group) for unit in units):
            titles[Kind.BACKWARD] = f"gradient of {title}"
        folded = tuple(self.box(kind, titles[kind], found) for kind, found in kinds.items())
        self.became.update((box.key, folded[0].key) for box in filter(_is_value, inside))
        return folded[0] if len(folded) == 1 else Group(f"u{folded[0].key}", "", None, folded, beside=True)

    def without_gradient(self, unit: Part) -> Part:
        """A unit that stays, but for the nodes of its gradient, which become one."""
        if isinstance(unit, Box):
            return unit
        if _is_gradient(unit):
            return self.box(Kind.BACKWARD, unit.title, list(boxes(unit)))
        return replace(unit, parts=tuple(map(self.without_gradient, unit.parts))) if unit.beside else unit

    def box(self, kind: Kind, title: str, found: Sequence[Box]) -> Box:
        self.became.update((box.key, found[0].key) for box in found)
        nodes = sum(box.nodes for box in found)
        operators = [f"{number} {name}" for name, number in Counter(box.title for box in found).most_common()]
        others = len(operators) - SHOWN
        more = [f"{others} other operator{'s' * (others > 1)}"] if others > 0 else []
        lines = (f"{nodes} node{'s' * (nodes > 1)}", *operators[:SHOWN], *more)
        return Box(found[0].key, kind, title, lines, "\n".join(operators), nodes)

    def drawing(self, root: Group) -> Drawing:
        """The drawing with `root`, without the values that only one folded part knows: its box counts them."""
        tensors: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
        for edge in self.old.edges:
            ends = (self.now(edge.source), self.now(edge.target))
            if ends[0] != ends[1]:
                tensors[ends].update(dict.fromkeys(edge.tensors))
        hosts = self.hosts(root, tensors)
        counts: dict[str, Counter[Kind]] = defaultdict(Counter)
        for value, host in hosts.items():
            counts[host][self.old.boxes[value].kind] += 1
        edges = [Edge(*ends, tuple(names)) for ends, names in tensors.items() if not hosts.keys() & set(ends)]
        made: dict[str, dict[str, None]] = {key: {} for key in self.became.values()}
        for edge in edges:
            if edge.source in made:
                made[edge.source].update(dict.fromkeys(edge.tensors))
        return replace(self.old, root=_finished(root, hosts, counts, made), edges=tuple(edges))

    def now(self, key: str) -> str:
        """The box that a box went into: a body's may have gone into one that went into another itself."""
        while (other := self.became.get(key, key)) != key:
            key = other
        return key

    def hosts(self, root: Group, ends: Mapping[tuple[str, str], object]) -> dict[str, str]:
        """Each weight, constant, state or gradient that only one folded part touches -> that part's first box."""
        unit = {box.key: part.key for part in _units(root) for box in boxes(part)}
        folded = set(self.became.values())
        touching: dict[str, list[str]] = defaultdict(list)
        for source, target in ends:
            touching[source].append(target)
            touching[target].append(source)
        return {
            key: found[0]
            for key, found in touching.items()
            if not self.old.boxes[key].nodes
            and self.old.boxes[key].kind not in STAYING
            and len({unit[other] for other in found}) == 1
            and folded.issuperset(found)
        }


def _title(key: Key, inside: Sequence[Box]) -> str:
    """What several units are called: as the module that they are of, or else from the first node to the last."""
    if isinstance(key, tuple):
        return visible(key[-1])
    titles = [box.title for box in inside if box.nodes]
    return f"{titles[0]} … {titles[-1]}"


def _is_value(part: Part) -> bool:
    return isinstance(part, Box) and part.nodes == 0


def _folded_kind(box: Box) -> Kind:
    return Kind.FORWARD if box.kind == Kind.CONSTANT else box.kind


def _is_gradient(part: Part) -> bool:
    """Whether a part is the frame around the nodes of a gradient, more than one, without bodies."""
    return isinstance(part, Group) and not part.container and not part.beside and all(map(_is_node, part.parts))


def _is_node(part: Part) -> bool:
    return isinstance(part, Box) and part.nodes > 0


def _by_module(units: Sequence[Part], depth: int) -> list[Key]:
    return [unit.scope[:depth] or i for i, unit in enumerate(units)]


def _folded_count(units: Sequence[Part], keys: Sequence[Key]) -> int:
    """How many boxes would stand for nodes."""
    alone = Counter(keys)
    kinds = {(key, _folded_kind(box)) for u, key in zip(units, keys, strict=True) for box in boxes(u) if box.nodes}
    whole = sum(_count_alone(unit) for unit, key in zip(units, keys, strict=True) if alone[key] == 1)
    return whole + sum(alone[key] > 1 for key, _ in kinds)


def _count_alone(unit: Part) -> int:
    if isinstance(unit, Group) and unit.beside:
        return sum(map(_count_alone, unit.parts))
    return 1 if _is_gradient(unit) else count(unit)


def _units(group: Group) -> Iterator[Part]:
    """The parts of a graph, then those of the bodies inside it."""
    if group.container:
        yield from group.parts
    for part in group.parts:
        if isinstance(part, Group):
            yield from _units(part)


def _finished(
    group: Group,
    hidden: Mapping[str, str],
    counts: Mapping[str, Mapping[Kind, int]],
    made: Mapping[str, Mapping[str, None]],
) -> Group:
    """The group without hidden values, after each folded box got what it hides and what comes out of it."""

    def finish(part: Part) -> Part:
        if isinstance(part, Group):
            return _finished(part, hidden, counts, made)
        if part.key not in made:
            return part
        within = [f"{n} {kind}{'s' * (n > 1)}" for kind, n in counts.get(part.key, {}).items()]
        out = list(map(short, made[part.key]))
        more = [f"and {len(out) - SHOWN} more"] if len(out) > SHOWN else []
        return replace(part, lines=(*part.lines, *within, *out[:SHOWN], *more), makes=len(out))

    return replace(group, parts=tuple(finish(part) for part in group.parts if part.key not in hidden))
