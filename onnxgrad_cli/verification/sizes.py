"""The test of what a model says of its sizes: a symbol on several axes says that these are equal.

Gradients are built on it: what is equal does not broadcast. So where the original runs with sizes that all differ, the
symbol is no promise, and each axis gets a size of its own. That costs nothing where no symbol stands on two axes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from onnx import ModelProto

from onnxgrad_cli.errors import Caution
from onnxgrad_cli.execution.limits import OverLimit, unasked
from onnxgrad_cli.execution.observation import Probe, fed_shapes, is_quick
from onnxgrad_cli.execution.sizes import leading_symbols, sized, sizes_to_try, summed, symbol_at
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.types import Dim, Shape, in_words, shape_of
from onnxgrad_cli.options import ShapeOptions
from onnxgrad_cli.passes.prepare.declarations import UNTESTED, Axis, forget_placeholders, repeated, taken_to_be_equal
from onnxgrad_cli.passes.prepare.fixed_shapes import fixed_sizes, rest_of, settle_sums
from onnxgrad_cli.verification.freed_batch import free_asked

MOST = 8
"""Axes of one symbol up to which each is tried alone: a decoder has two for each of its layers."""


class Promises(NamedTuple):
    """What became of the symbols that stand on several axes.

    Attributes:
        kept: those that the model does not run without, or that were not tested.
        broken: symbol -> the axes whose sizes are their own.
        untested: why the symbols of `kept` were not tested; "" if they were.
        freed: what was done to a batch that the model has fixed and `shapes` does not.
    """

    kept: tuple[str, ...] = ()
    broken: Mapping[str, tuple[Axis, ...]] | None = None
    untested: str = ""
    freed: tuple[Caution, ...] = ()

    def cautions(self) -> list[Caution]:
        """What a user should know of it."""
        found = [*self.freed] + [
            Caution("note", symbol, f"'{symbol}' stands for several sizes: the model runs where {_of(axes)} differ")
            for symbol, axes in (self.broken or {}).items()
        ]
        if self.kept and self.untested:
            found.append(taken_to_be_equal(self.kept, self.untested))
        return found


def settle_sizes(graph: Graph, options: ShapeOptions, tests: bool | None = None) -> Promises:
    """Forget what a model says of its sizes and does not mean: placeholders, and symbols that are no promise.

    Args:
        graph: the inference model; it is changed.
        options: the sizes and shapes that are given.
        tests: whether to run the model; by default where that is quick.
    """
    freed = tuple(free_asked(graph, options))
    forget_placeholders(graph)
    settle_sums(graph.proto, options.dims)
    tests = is_quick(graph.proto) if tests is None else tests
    return keep_promises(graph.proto, graph.path, tests, fixed_sizes(options))._replace(freed=freed)


def keep_promises(model: ModelProto, path: Path | None, tests: bool, sizes: Mapping[str, Sequence[int]]) -> Promises:
    """Find the symbols that are no promise, and take their names from the axes of the model, which is changed.

    Args:
        model: the inference model; external data are relative to `path`.
        path: where it was read from.
        tests: whether to run it; if not, all symbols are kept, and told.
        sizes: symbols and inputs that have a size or a shape already.
    """
    where = repeated(model, sizes)
    if not where:
        return Promises()
    if not tests:
        return Promises(tuple(where), untested=UNTESTED)
    try:
        with unasked(limited=is_quick(model)):
            runs = _baseline(model, path, sizes)
            broken = {s: axes for s, own in where.items() if (axes := runs.apart(own))} if runs else {}
    except OverLimit as error:
        return Promises(tuple(where), untested=f"which could not be tested: {error.message}")
    if runs is None:
        return Promises(tuple(where), untested="which could not be tested: the model does not run on drawn data")
    _forget(model, [axis for axes in broken.values() for axis in axes])
    return Promises(tuple(symbol for symbol in where if symbol not in broken), broken)


def wrong_shape(model: ModelProto, path: Path | None, graph: Graph, sizes: Mapping[str, Sequence[int]]) -> str:
    """How the shape of a value in a run of the original contradicts the one that it was built with; "" where none does.

    Args:
        model: the inference model; external data are relative to `path`.
        path: where it was read from.
        graph: what was built of it.
        sizes: symbols and inputs that have a size or a shape.
    """
    names = [name for node in model.graph.node for name in node.output if shape_of(graph.types.get(name)) is not None]
    names = [name for name in names if name not in graph.initializers]
    runs: _Runs | None = None
    with unasked(limited=is_quick(model)), suppress(OverLimit):
        runs = _baseline(model, path, sizes, names)
    for each in runs.observed if runs is not None else ():
        bound: dict[str, int] = {}
        for name, shape in each.items():
            said = shape_of(graph.types.get(name)) or ()
            if len(said) != len(shape) or not all(map(_Binding(graph, bound), said, shape)):
                return f"'{name}' has shape {list(shape)} in a run, it was taken for {in_words(graph.types[name])}"
    return ""


class _Binding:
    """Gives symbols the sizes that they have in a run, and says whether they had them before."""

    def __init__(self, graph: Graph, bound: dict[str, int]) -> None:
        self._multiples = graph.multiples
        self._bound = bound

    def __call__(self, said: Dim, size: int) -> bool:
        if not isinstance(said, str):
            return said == size
        factor, symbol = self._multiples.get(said, (1, said))
        if factor > 1 and symbol in self._bound:
            return factor * self._bound[symbol] == size
        return said == "?" or self._bound.setdefault(said, size) == size


class _Runs:
    """Whether a model runs where some of its axes have sizes of their own."""

    def __init__(self, probe: Probe, shapes: Mapping[str, Shape], base: Mapping[str, int]) -> None:
        self._probe = probe
        self._shapes = shapes
        self._base = base
        self.observed: list[dict[str, tuple[int, ...]]] = []

    def apart(self, axes: Sequence[Axis]) -> tuple[Axis, ...]:
        """The axes of a symbol that need not be as long as its others: all, those at one position, or single ones."""
        groups: dict[int, list[Axis]] = defaultdict(list)
        for axis in axes:
            groups[axis[1]].append(axis)
        if self.differ({axis: i for i, axis in enumerate(axes)}):
            return tuple(axes)
        if len(groups) > 1 and self.differ({axis: i for i, own in enumerate(groups.values()) for axis in own}):
            return tuple(axes)
        alone = axes if 2 < len(axes) <= MOST else ()
        return tuple(axis for axis in alone if self.differ({axis: 1}))

    def differ(self, classes: Mapping[Axis, int]) -> bool:
        """Whether the model runs whichever classes of axes are longer: an index may reach into what is longer."""
        return self.run(classes) and self.run(classes, descending=True)

    def run(self, classes: Mapping[Axis, int], descending: bool = False) -> bool:
        """Whether the model runs where axes of different classes differ; those without one are of class 0."""
        shapes = self._assigned(classes, descending)
        try:
            values = self._probe(shapes)
        except OverLimit:
            raise
        except Exception:  # onnxruntime's exceptions share no base class
            return False
        self.observed.append({name: tuple(shape) for name, shape in shapes.items()})
        if self._probe.shapes_only:
            self.observed[-1].update((name, tuple(shape.tolist())) for name, shape in values.items())
        return True

    def _assigned(self, classes: Mapping[Axis, int], descending: bool) -> dict[str, list[int]]:
        """Shapes of the inputs in which the axes of each class have a size of their own, longer from class to class.

        What they are longer by is a multiple of what sizes are multiples of; other symbols keep their sizes.
        """
        leading = leading_symbols(self._shapes)
        alike = {
            leads: [self._base[symbol] for symbol in leading if leading[symbol] == leads] for leads in (True, False)
        }
        step = {True: len(alike[True]), False: len(alike[False]) * (math.gcd(*alike[False]) or 1)}
        tested = {symbol_at(name, axis, str(self._shapes[name][axis])) for name, axis in classes}
        last = max(classes.values(), default=0)

        def size(symbol: str, number: int) -> int:
            return self._base[symbol] + (last - number if descending else number) * step[leading[symbol]]

        found = sized(self._shapes, summed({**self._base, **{symbol: size(symbol, 0) for symbol in tested}}))
        for (name, axis), number in classes.items():
            if number:
                found[name][axis] = size(symbol_at(name, axis, str(self._shapes[name][axis])), number)
        return found


def _baseline(
    model: ModelProto, path: Path | None, sizes: Mapping[str, Sequence[int]], names: Sequence[str] | None = None
) -> _Runs | None:
    """The runs of a model at the first sizes at which it runs as it promises, which fetch the shapes of values."""
    fetched = [value.name for value in model.graph.output] if names is None else names
    declared = fed_shapes(model)
    if declared is None:
        return None
    try:
        probe = Probe(model, fetched, path, shapes_only=names is not None)
    except Exception:  # onnxruntime's exceptions share no base class
        return None
    given = {symbol: size[0] for symbol, size in sizes.items() if symbol not in declared}
    shapes: dict[str, Shape] = {
        name: tuple(sizes.get(name, (rest_of(dim, given) if isinstance(dim, str) else dim for dim in shape)))
        for name, shape in declared.items()
    }
    tried = sizes_to_try(shapes, model, apart=True, ones=False)  # an axis of 1 fits any other
    runs = (_Runs(probe, shapes, base) for base in tried if all(base.values()))  # of an empty past any size would fit
    return next((each for each in runs if each.run({})), None)


def _forget(model: ModelProto, axes: Iterable[Axis]) -> None:
    values = {value.name: value for value in model.graph.input}
    for name, position in axes:
        values[name].type.tensor_type.shape.dim[position].Clear()


def _of(axes: Sequence[Axis]) -> str:
    """Axes in words, as 'x[2] and x[3]'."""
    words = [f"{name}[{position}]" for name, position in axes]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else [f"{words[0]} and the others"])
