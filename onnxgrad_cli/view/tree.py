"""Convert a drawing to a tree of nested modules that a reader can fold and unfold.

Modules come from the scopes that exporters store. A level with too many children for the layout, such as the top level
of a model without scopes, is divided into blocks of neighboring children. Each weight, constant, state and gradient is
placed in the innermost module that contains all boxes connected to it. Inputs and outputs are outside all modules.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile

from onnxgrad_cli.common.escape import escaped
from onnxgrad_cli.view.drawing import Box, BoxKind, Cluster, Drawing, Part, connected, is_value

WIDEST = 60
"""A branch of the tree with more children than this gets blocks of neighboring children as its children instead."""

DEEPEST = 40
"""Largest depth of nested modules in the tree. Modules below it are not shown as levels of their own."""

Touching = dict[str, list[str]]
"""Key of a box -> the keys of all boxes connected to it by an edge."""

OUTSIDE = frozenset({BoxKind.INPUT, BoxKind.OUTPUT})
"""Kinds of values that are placed outside all modules."""


@dataclass(eq=False)
class Branch:
    """A part of the tree: a box, a row of parts that belong together, or a frame that can be folded.

    Attributes:
        title: the title of the frame; "" for a box.
        box: the box, if the branch is a leaf; otherwise None.
        row: True if the children are drawn side by side: a node, its bodies, and its gradient.
        unit: True if the branch is a node with its bodies and its gradient. No value is placed inside a unit.
        children: the branches inside, in the order of the model.
    """

    title: str = ""
    box: Box | None = None
    row: bool = False
    unit: bool = False
    children: list[Branch] = field(default_factory=list)


def tree(drawing: Drawing) -> Branch:
    """Convert a drawing to a tree. The drawing must not be folded."""
    return _container(drawing.root, connected((edge.source, edge.target) for edge in drawing.edges), "")


def _container(group: Cluster, touching: Touching, title: str) -> Branch:
    """Return the branch of a model's graph or of a body: its modules, with the graph's values placed in them."""
    units = [part for part in group.parts if not is_value(part)]
    root = Branch(title, children=_cut(_modules(units, 0, touching)))
    paths = dict(_paths(root, ()))
    placed: dict[int, dict[int, list[Branch]]] = defaultdict(lambda: defaultdict(list))
    homes = {id(root): root}
    for part in group.parts:
        if isinstance(part, Box) and is_value(part):
            ends = [paths[key] for key in touching[part.key] if key in paths] if part.kind not in OUTSIDE else []
            path = _common(ends) or (root,)
            home = path[-1]
            homes[id(home)] = home
            placed[id(home)][_place(part, home, ends, len(path))].append(Branch(box=part))
    for key, at in placed.items():
        homes[key].children = _with_values(homes[key].children, at)
    return root


def _with_values(children: list[Branch], at: dict[int, list[Branch]]) -> list[Branch]:
    """Return the children of a level with values inserted. `at` maps the index of a child to the values before it.

    If there are many values, they are put into one branch.
    """
    if sum(map(len, at.values())) > WIDEST // 2:
        values = [value for i in sorted(at) for value in at[i]]
        return _cut([Branch("values", children=_cut(values)), *children])
    level = [*at.get(-1, ())]
    for i, child in enumerate(children):
        level += [*at.get(i, ()), child]
    return _cut([*level, *at.get(len(children), ())])


def _place(value: Box, home: Branch, ends: list[tuple[Branch, ...]], depth: int) -> int:
    """Return the index of the child before which a value is placed in its branch.

    It is the first child connected to the value. Inputs come first, outputs and unconnected values last.
    """
    if value.kind in OUTSIDE or not ends:
        return -1 if value.kind == BoxKind.INPUT else len(home.children)
    first = {id(path[depth]) for path in ends if len(path) > depth}
    return next((i for i, child in enumerate(home.children) if id(child) in first), len(home.children))


def _modules(units: list[Part], depth: int, touching: Touching) -> list[Branch]:
    """Return branches for units, grouped by module at a depth. A module with a single child has no branch."""
    together: dict[tuple[str, ...] | int, list[Part]] = defaultdict(list)
    for i, unit in enumerate(units):
        together[unit.scope[: depth + 1] if depth < min(len(unit.scope), DEEPEST) else i].append(unit)
    found: list[Branch] = []
    for key, inside in together.items():
        if isinstance(key, int):
            found.append(_unit(inside[0], touching))
            continue
        children = _modules(inside, depth + 1, touching)
        found += children if len(children) == 1 else [Branch(escaped(key[-1]), children=_cut(children))]
    return found


def _unit(part: Part, touching: Touching) -> Branch:
    """Return the branch of a node with its bodies and its gradient, or of a single body."""
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
    """Group neighboring branches into blocks, and these into larger blocks, until at most `WIDEST` are left."""
    while len(level) > WIDEST:
        size = -(-len(level) // -(-len(level) // WIDEST))
        runs = [level[i : i + size] for i in range(0, len(level), size)]
        level = [Branch(f"{i}: {_name(run[0])} … {_name(run[-1])}", children=run) for i, run in enumerate(runs, 1)]
    return level


def _name(branch: Branch) -> str:
    """Return the name of a branch for the title of its block, which names its first and its last branch."""
    while branch.box is None and (branch.row or not branch.title):
        branch = branch.children[0]
    return branch.box.title if branch.box else branch.title.partition(" … ")[0].rpartition(": ")[2]


def _paths(branch: Branch, above: tuple[Branch, ...]) -> Iterator[tuple[str, tuple[Branch, ...]]]:
    """Yield (key, path) for each box. The path leads from the outermost branch to the unit that contains the box."""
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
    """Return the branches that all paths share, from the outermost one on. The last branch of a path is not counted."""
    levels = zip(*(path[:-1] for path in paths), strict=False)
    return tuple(level[0] for level in takewhile(lambda level: all(other is level[0] for other in level), levels))
