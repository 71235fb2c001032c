"""Find out whether axes with the same symbol (named dimension) must have the same size.

A shared symbol promises equal sizes, and rules rely on it: axes of equal sizes don't broadcast. If the original also
runs with a different size for each axis, the promise doesn't hold, and each axis gets its own symbol. A model in which
no symbol is on two axes is not run.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from onnx import ModelProto

from onnxgrad_cli.errors import Caution
from onnxgrad_cli.execution.limits import OverLimit, within_budget
from onnxgrad_cli.execution.observation import Probe, fed_shapes, is_quick
from onnxgrad_cli.execution.sizes_to_try import leading_symbols, sized, sizes_to_try, summed, symbol_at
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.types import Dim, Shape, in_words, shape_of
from onnxgrad_cli.options import ShapeOptions
from onnxgrad_cli.passes.prepare.declarations import UNTESTED, Axis, forget_placeholders, repeated, taken_to_be_equal
from onnxgrad_cli.passes.prepare.fixed_shapes import fixed_sizes, rest_of, settle_sums

MAX_AXES_TRIED_ALONE = 8
"""If a symbol is on at most this many axes, each axis is also tested alone.

A decoder has two such axes per layer.
"""


class Promises(NamedTuple):
    """The result of testing the symbols that are on several axes.

    Attributes:
        kept: symbols whose axes must have the same size, and symbols that were not tested.
        broken: symbol whose axes may differ -> the axes that may have sizes of their own.
        untested: the reason why the symbols of `kept` were not tested; "" if they were.
        freed: notes about a fixed batch size that the option `shapes` has made dynamic.
    """

    kept: tuple[str, ...] = ()
    broken: Mapping[str, tuple[Axis, ...]] | None = None
    untested: str = ""
    freed: tuple[Caution, ...] = ()

    def cautions(self) -> list[Caution]:
        """Return the notes and warnings about the symbols for the user."""
        found = [*self.freed]
        for symbol, axes in (self.broken or {}).items():
            text = f"'{symbol}' is used for several sizes, because the model also runs if {_of(axes)} differ"
            found.append(Caution("note", symbol, text))
        if self.kept and self.untested:
            found.append(taken_to_be_equal(self.kept, self.untested))
        return found


def settle_sizes(graph: Graph, options: ShapeOptions, tests: bool | None = None) -> Promises:
    """Remove wrong declared sizes: placeholder sizes, and shared symbols on axes whose sizes may differ.

    Args:
        graph: the inference model; it is changed.
        options: the sizes and shapes that the user gives.
        tests: True runs the model to test its symbols, False doesn't. By default it is run if that is quick.
    """
    freed: tuple[Caution, ...] = ()
    if options.shapes:
        from onnxgrad_cli.verification.checks.freed_batch import free_asked  # few builds free a batch size

        freed = tuple(free_asked(graph, options))
    forget_placeholders(graph)
    settle_sums(graph.proto, options.dims)
    tests = is_quick(graph.proto) if tests is None else tests
    return keep_promises(graph.proto, graph.path, tests, fixed_sizes(options))._replace(freed=freed)


def keep_promises(model: ModelProto, path: Path | None, tests: bool, sizes: Mapping[str, Sequence[int]]) -> Promises:
    """Find the symbols whose axes may have different sizes, and remove them from the axes of the model.

    Args:
        model: the inference model, which is changed; external data are relative to `path`.
        path: the file it was read from.
        tests: False keeps all symbols without running the model; the result says so.
        sizes: symbol -> its size in a list, and input -> its shape, if the user gives them.
    """
    where = repeated(model, sizes)
    if not where:
        return Promises()
    if not tests:
        return Promises(tuple(where), untested=UNTESTED)
    try:
        with within_budget(limited=is_quick(model)):
            runs = _baseline(model, path, sizes)
            broken = {s: axes for s, own in where.items() if (axes := runs.apart(own))} if runs else {}
    except OverLimit as error:
        return Promises(tuple(where), untested=f"which could not be tested: {error.message}")
    if runs is None:
        return Promises(tuple(where), untested="which could not be tested: the model does not run on random data")
    _forget(model, [axis for axes in broken.values() for axis in axes])
    return Promises(tuple(symbol for symbol in where if symbol not in broken), broken)


def wrong_shape(model: ModelProto, path: Path | None, graph: Graph, sizes: Mapping[str, Sequence[int]]) -> str:
    """Run the model and return a description of the first value whose shape contradicts the graph, or "".

    Args:
        model: the inference model; external data are relative to `path`.
        path: the file it was read from.
        graph: the graph that was built from the model, with the inferred shapes.
        sizes: see `keep_promises`.
    """
    names = [name for node in model.graph.node for name in node.output if shape_of(graph.types.get(name)) is not None]
    names = [name for name in names if name not in graph.initializers]
    runs: _Runs | None = None
    with within_budget(limited=is_quick(model)), suppress(OverLimit):
        runs = _baseline(model, path, sizes, names)
    for each in runs.observed if runs is not None else ():
        bound: dict[str, int] = {}
        for name, shape in each.items():
            said = shape_of(graph.types.get(name)) or ()
            if len(said) != len(shape) or not all(map(partial(_binds, graph.multiples, bound), said, shape)):
                return (
                    f"'{name}' has the shape {list(shape)} in a run, but the training model was built for "
                    f"{in_words(graph.types[name])}"
                )
    return ""


def _binds(multiples: Mapping[str, tuple[int, str]], bound: dict[str, int], said: Dim, size: int) -> bool:
    """Return True if a declared dimension allows this size, and record the size of a new symbol in `bound`."""
    if not isinstance(said, str):
        return said == size
    factor, symbol = multiples.get(said, (1, said))
    if factor > 1 and symbol in bound:
        return factor * bound[symbol] == size
    return said == "?" or bound.setdefault(said, size) == size


class _Runs:
    """Runs a model with different sizes for some of its axes, and records the shapes of the successful runs."""

    def __init__(self, probe: Probe, shapes: Mapping[str, Shape], base: Mapping[str, int]) -> None:
        self._probe = probe
        self._shapes = shapes
        self._base = base
        self.observed: list[dict[str, tuple[int, ...]]] = []

    def apart(self, axes: Sequence[Axis]) -> tuple[Axis, ...]:
        """Return the axes of a symbol that may have sizes of their own.

        All axes are returned if the model runs with a different size for each axis. They are also returned if it runs
        with one size for axis 0 of all inputs, another for axis 1, and so on. Otherwise each axis is tested alone.
        """
        groups: dict[int, list[Axis]] = defaultdict(list)
        for axis in axes:
            groups[axis[1]].append(axis)
        if self.differ({axis: i for i, axis in enumerate(axes)}):
            return tuple(axes)
        if len(groups) > 1 and self.differ({axis: i for i, own in enumerate(groups.values()) for axis in own}):
            return tuple(axes)
        alone = axes if 2 < len(axes) <= MAX_AXES_TRIED_ALONE else ()
        return tuple(axis for axis in alone if self.differ({axis: 1}))

    def differ(self, classes: Mapping[Axis, int]) -> bool:
        """Return True if the model runs with sizes that rise with the class of an axis, and with sizes that fall.

        One order is not enough, because a run may succeed only as long as an index stays within the longer axis.
        """
        return self.run(classes) and self.run(classes, descending=True)

    def run(self, classes: Mapping[Axis, int], descending: bool = False) -> bool:
        """Return True if the model runs with a different size for each class of axes.

        `classes` maps an axis to the number of its class. Other axes are of class 0. With `descending`, lower numbers
        get larger sizes.
        """
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
        """Return shapes of the inputs in which each class of axes has its own size.

        The sizes differ by multiples of the common divisor of all sizes. Other symbols keep their sizes.
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
    """Try sizes in turn until the model runs on inputs of the declared shapes, and return an object for further runs.

    Return None if no sizes are found.

    Args:
        model: the model; external data are relative to `path`.
        path: the file it was read from.
        sizes: see `keep_promises`.
        names: the values whose shapes each run records; by default the model's outputs are fetched instead.
    """
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
    tried = sizes_to_try(shapes, model, apart=True, ones=False)  # an axis of size 1 fits any other
    runs = (_Runs(probe, shapes, base) for base in tried if all(base.values()))  # an empty axis fits any other
    return next((each for each in runs if each.run({})), None)


def _forget(model: ModelProto, axes: Iterable[Axis]) -> None:
    values = {value.name: value for value in model.graph.input}
    for name, position in axes:
        values[name].type.tensor_type.shape.dim[position].Clear()


def _of(axes: Sequence[Axis]) -> str:
    """Return axes as a text, such as 'x[2] and x[3]'."""
    words = [f"{name}[{position}]" for name, position in axes]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else [f"{words[0]} and the others"])
