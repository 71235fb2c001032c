"""Compile with numba, where that is installed, what an optimizer does to each element of a weight: as one loop.

The loop reads and writes each number once, and needs no lock of Python's. It does what numpy's functions do one after
the other (`elementwise`): the same operations of IEEE 754 in the same order, of which numba contracts none, so that the
bits are the same. AdamW on two million numbers takes 0.6 ns a number so, and 2.1 to 3 by numpy (one thread).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np

from onnxgrad_cli.passes.optimizer.slices import Update
from onnxgrad_cli.training.steps.elementwise import InPlace, Scratch

TERMS = {
    "Abs": "abs({0})", "Add": "{0} + {1}", "And": "{0} and {1}", "Clip": "np.minimum(np.maximum({0}, {1}), {2})",
    "Div": "{0} / {1}", "Equal": "{0} == {1}",
    "Greater": "{0} > {1}", "GreaterOrEqual": "{0} >= {1}", "Less": "{0} < {1}", "LessOrEqual": "{0} <= {1}",
    "Max": "np.maximum({0}, {1})", "Min": "np.minimum({0}, {1})", "Mul": "{0} * {1}", "Neg": "-{0}", "Not": "not {0}",
    "Or": "{0} or {1}", "Sign": "np.sign({0}) + zero", "Sqrt": "np.sqrt({0})", "Sub": "{0} - {1}", "Sum": "{0} + {1}",
    "Where": "{1} if {0} else {2}",
}  # fmt: skip
"""Operator -> Python for an element of the result. All are exact or rounded once; exponentials and powers are not, and
libraries differ in their last digits. `zero` takes the sign of a zero's sign, which numpy gives none; of two zeros,
numpy leaves open which is the larger."""

EXACT = frozenset(map(np.dtype, (np.float32, np.float64, np.bool_)))
"""The types in which a processor computes them so."""


MEMORY = 128 * 10**6
"""Bytes that it takes to load numba and to compile, which takes 0.4 s."""


def update_of(update: Update) -> InPlace | CompiledUpdate:
    """An update, compiled where that can be."""
    return CompiledUpdate(update) if is_compiled(update) else InPlace(update)


def is_compiled(update: Update) -> bool:
    """Whether an update is compiled: there is numba, and it gives the bits that numpy gives."""
    return is_covered(update) and load_numba() is not None


def is_covered(update: Update) -> bool:
    """Whether all that an update computes has a term, of as many operands, and a type that is computed exactly."""
    counts = {op_type: term.count("{") for op_type, term in TERMS.items()}
    kinds = {*update.dtypes.values(), *(constant.dtype for constant in update.constants.values())}
    return kinds <= EXACT and all(
        all(node.input) and counts.get(node.op_type) == len(node.input) for node in update.nodes
    )


class CompiledUpdate:
    """An `Update` as a loop over elements; used as `InPlace` is."""

    def __init__(self, update: Update) -> None:
        """Write the loop; it is compiled when it runs first, once for all weights that are updated alike.

        Args:
            update: one that `is_covered`.
        """
        self._vectors = tuple(dict.fromkeys((*update.vectors, *update.outputs.values())))
        self._scalars = update.scalars
        self._constants = list(map(_scalar, update.constants.values()))
        self._loop = _compiled(self._source(update))

    def run(self, values: Mapping[str, np.ndarray], start: int, stop: int, scratch: Scratch) -> None:
        """Update the elements from `start` to `stop`; see `InPlace.run`."""
        scalars = (_scalar(values[name]) for name in self._scalars)
        self._loop(*(values[name][start:stop] for name in self._vectors), *scalars, *self._constants)

    def _source(self, update: Update) -> str:
        """Python of the loop, in which values have numbers, so that it is the same for weights updated alike."""
        given = (*self._vectors, *self._scalars, *update.constants)
        arguments = {name: f"a{i}" for i, name in enumerate(given)}
        element = {name: f"{arguments[name]}[i]" if name in self._vectors else arguments[name] for name in given}
        lines = []
        for number, node in enumerate(update.nodes):
            lines.append(f"x{number} = {TERMS[node.op_type].format(*map(element.__getitem__, node.input))}")
            element[node.output[0]] = f"x{number}"
        lines += [f"{arguments[old]}[i] = {element[new]}" for new, old in update.outputs.items()]
        body = "\n".join(f"        {line}" for line in lines)
        return f"def loop({', '.join(arguments.values())}):\n    for i in range(a0.size):\n{body}\n"


def _scalar(array: np.ndarray) -> np.generic:
    """The element of an array of one, in its type."""
    return array.reshape(-1)[0]


@cache
def _compiled(source: str) -> Callable[..., None]:
    names: dict[str, Any] = {"np": np, "zero": np.float32(0)}
    exec(source, names)  # of our own words and numbers alone
    numba = load_numba()
    assert numba is not None
    return numba.njit(nogil=True, error_model="numpy")(names["loop"])


@cache
def load_numba() -> ModuleType | None:
    """The package; None where it is not installed, or not for a numpy as new as this one, which its import refuses."""
    try:
        return import_module("numba")
    except ImportError:
        return None
