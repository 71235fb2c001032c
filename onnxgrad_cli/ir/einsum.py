"""The notation of Einsum: which axis of which operand bears which label, and the shape that follows.

Source: https://onnx.ai/onnx/operators/onnx__Einsum.html
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from string import ascii_letters
from typing import Protocol

from onnxgrad_cli.errors import Unknown
from onnxgrad_cli.ir.types import Dim, Shape

TERM = r"[A-Za-z]*(\.{3}[A-Za-z]*)?"
WELL_FORMED = re.compile(rf"{TERM}(,{TERM})*(->{TERM})?")


class Operand(Protocol):
    """A value that has a name and a known rank."""

    @property
    def name(self) -> str:
        """What the value is called."""

    @property
    def shape(self) -> Shape:
        """The dimensions, symbols as strings."""


def is_equation(text: str) -> bool:
    """Whether a text is one: terms of letters and at most one ellipsis, between commas, the output's after an arrow."""
    return WELL_FORMED.fullmatch(text.replace(" ", "")) is not None


def parse_equation(equation: str, operands: Sequence[Operand]) -> tuple[list[str], str]:
    """The labels of the operands and of the output, where an ellipsis is labels that are free.

    An implicit output has the axes of the ellipsis, then in order the labels that stand once.

    Raises:
        Unknown: an operand has another rank than its subscripts say, or the ellipses have more axes than letters.
    """
    equation = equation.replace(" ", "")
    left, arrow, output = equation.partition("->")
    terms = left.split(",")
    hidden = [len(x.shape) - len(term.replace("...", "")) for term, x in zip(terms, operands, strict=True)]
    for term, x, count in zip(terms, operands, hidden, strict=True):
        if count < 0 or (count and "..." not in term):
            raise Unknown(f"'{x.name}' has {len(x.shape)} axes, its subscripts '{term}' say otherwise")
    if not arrow:
        labels = re.findall("[A-Za-z]", left)
        output = ("..." if "..." in left else "") + "".join(sorted(x for x in set(labels) if labels.count(x) == 1))
    most = max(hidden)
    free = "".join(label for label in ascii_letters if label not in equation)[:most]
    if len(free) < most:
        raise Unknown(f"the equation '{equation}' leaves too few letters free for the axes of its ellipses")
    terms = [term.replace("...", free[most - count :]) for term, count in zip(terms, hidden, strict=True)]
    return terms, output.replace("...", free)


def einsum_shape(equation: str, operands: Sequence[Operand]) -> list[Dim | None]:
    """The output's dimensions, None where they are unknown; onnx takes each from the first operand that has it.

    Raises:
        Unknown: as of `parse_equation`.
    """
    terms, output = parse_equation(equation, operands)
    pairs = [pair for term, x in zip(terms, operands, strict=True) for pair in zip(term, x.shape, strict=True)]
    found = [{size for label, size in pairs if label == each and size != 1} for each in output]
    known = [{size for size in sizes if len(sizes) == 1 or isinstance(size, int)} for sizes in found]
    return [1 if not sizes else ints.pop() if ints else None for sizes, ints in zip(found, known, strict=True)]
