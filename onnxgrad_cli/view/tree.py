"""A drawing as a tree that a reader folds and unfolds: modules in modules, each level small enough to be laid out.

Modules come from the scopes that exporters leave. A level that is still too wide, as that of a model without scopes,
is cut into blocks of neighbours. Each weight, constant, state and gradient stands in the innermost module that holds
everything it touches; inputs and outputs stand outside all modules.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from onnxgrad_cli.common.visible import visible
from onnxgrad_cli.view.drawing import Box, Drawing, Group, Kind, Part

WIDEST = 60
"""Children up to which a level is not cut into blocks."""

DEEPEST = 40
"""Levels of modules that are told apart."""

Touching = dict[str, list[str]]
"""A box -> the boxes that it reads from, or that read from it."""

OUTSIDE = frozenset({Kind.INPUT, Kind.OUTPUT})
"""Kinds of values that stand outside all modules."""


@dataclass(eq=False)
class Branch:
    """A part of the tree: a box, a row of what belongs together, or what can be unfolded.

    Attributes:
        title: of the frame, or "" for a box.
        box: what it shows, where it is a leaf.
        row: whether its children stand beside each other: a node, its bodies, and its gradient.
        unit: whether it is a node with what belongs to it: no value is put inside.
        children: what lies in it, in the order of the model.
    """

    title: str = ""
    box: Box | None = None
    row: bool = False
    unit: bool = False
    children: list[Branch] = field(default_factory=list)


def tree(drawing: Drawing) -> Branch:
    """The whole drawing as a tree; `drawing` should not be folded yet."""
    touching: Touching = defaultdict(list)
    for edge in drawing.edges:
        touching[edge.source].append(edge.target)
        touching[edge.target].append(edge.source)
    return _container(drawing.root, touching, "")


def _container(group: Group, touching: Touching, title: str) -> Branch:
    """The graph of a model or of a body: its modules, then its values where they belong."""
    units = [part for part in group.parts if not _is_value(part)]
    root = Branch(title, children=_cut(_modules(units, 0, touching)))
    paths = dict(_paths(root, ()))
    placed: dict[int, dict[int, list[Branch]]] = defaultdict(lambda: defaultdict(list))
    homes = {id(root): root}
    for part in group.parts:
        if isinstance(part, Box) and _is_value(part):
            ends = [paths[key] for key in touching[part.key] if key in paths] if part.kind not in OUTSIDE else []
            path = _common(ends) or (root,)
            home = path[-1]
            homes[id(home)] = home
            placed[id(home)][_place(part, home, ends, len(path))].append(Branch(box=part))
    for key, at in placed.items():
        homes[key].children = _with_values(homes[key].children, at)
    return root


def _with_values(children: list[Branch], at: dict[int, list[Branch]]) -> list[Branch]:
    """A level with its values: each before the child at its number, or all in one branch where they are many."""
    if sum(map(len, at.values())) > WIDEST // 2:
        values = [value for i in sorted(at) for value in at[i]]
        return _cut([Branch("values", children=_cut(values)), *children])
    level = [*at.get(-1, ())]
    for i, child in enumerate(children):
        level += [*at.get(i, ()), child]
    return _cut([*level, *at.get(len(children), ())])


def _place(value: Box, home: Branch, ends: list[tuple[Branch, ...]], depth: int) -> int:
    """Before which child of its home a value stands: before the first that it touches, inputs first, outputs last."""
    if value.kind in OUTSIDE or not ends:
        return -1 if value.kind == Kind.INPUT else len(home.children)
    first = {id(path[depth]) for path in ends if len(path) > depth}
    return next((i for i, child in enumerate(home.children) if id(child) in first), len(home.children))


def _is_value(part: Part) -> bool:
    return isinstance(part, Box) and part.nodes == 0


def _modules(units: list[Part], depth: int, touching: Touching) -> list[Branch]:
    """The units, those of one module at this depth in one branch, where it holds more than one."""
    together: dict[tuple[str, ...] | int, list[Part]] = defaultdict(list)
    for i, unit in enumerate(units):
        together[unit.scope[: depth + 1] if depth < min(len(unit.scope), DEEPEST) else i].append(unit)
    found: list[Branch] = []
    for key, inside in together.items():
        if isinstance(key, int):
            found.append(_unit(inside[0], touching))
            continue
        children = _modules(inside, depth + 1, touching)
        found += children if len(children) == 1 else [Branch(visible(key[-1]), children=_cut(children))]
    return found


def _unit(part: Part, touching: Touching) -> Branch:
    """A node with what belongs to it."""
    if isinstance(part, Box):
        return Branch(box=part, unit=True)
    if part.container:
        body = _container(part, touching, part.title or "body")
        body.unit = True
        return body
    inner = [_unit(each, touching) for each in part.parts]
    if len(inner) == 1:
        return inner[0]
    return Branch(part.title, row=part.beside, unit=True, children=inner if part.beside else _cut(inner))


def _cut(level: list[Branch]) -> list[Branch]:
    """Neighbours in blocks, and those in blocks, until the level is not wider than `WIDEST`."""
    while len(level) > WIDEST:
        size = -(-len(level) // -(-len(level) // WIDEST))
        runs = [level[i : i + size] for i in range(0, len(level), size)]
        level = [Branch(f"{i}: {_name(run[0])} … {_name(run[-1])}", children=run) for i, run in enumerate(runs, 1)]
    return level


def _name(branch: Branch) -> str:
    """What stands first in a block, or last: a box by its title, a block by its own ends."""
    while branch.box is None and (branch.row or not branch.title):
        branch = branch.children[0]
    return branch.box.title if branch.box else branch.title.partition(" … ")[0].rpartition(": ")[2]


def _paths(branch: Branch, above: tuple[Branch, ...]) -> Iterator[tuple[str, tuple[Branch, ...]]]:
    """Each box with what can be unfolded around it, outermost first, at last the unit that it is in."""
    above = (*above, branch)
    if branch.unit:
        yield from ((box.key, above) for box in _leaves(branch))
    else:
        for child in branch.children:
            yield from _paths(child, above)


def _leaves(branch: Branch) -> Iterator[Box]:
    if branch.box is not None:
        yield branch.box
    for child in branch.children:
        yield from _leaves(child)


def _common(paths: list[tuple[Branch, ...]]) -> tuple[Branch, ...]:
    """What lies around all ends of the paths, without the ends themselves."""
    if not paths:
        return ()
    shared: list[Branch] = []
    for level in zip(*(path[:-1] for path in paths), strict=False):
        if any(other is not level[0] for other in level):
            break
        shared.append(level[0])
    return tuple(shared)
