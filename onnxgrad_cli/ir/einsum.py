"""Parse equations of Einsum into the labels of each operand's axes, and compute the shape of the result.

Source: https://onnx.ai/onnx/operators/onnx__Einsum.html
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from string import ascii_letters

from onnxgrad_cli.errors import Unknown
from onnxgrad_cli.ir.types import Dim, Shape

TERM = r"[A-Za-z]*(\.{3}[A-Za-z]*)?"
WELL_FORMED = re.compile(rf"{TERM}(,{TERM})*(->{TERM})?")


Operand = tuple[str, Shape]
"""An operand of an Einsum: the name and the shape of a value."""


def is_equation(text: str) -> bool:
    """Return True if a text is an equation of Einsum.

    An equation has terms between commas, and optionally the term of the output after an arrow. A term consists of
    letters and at most one ellipsis.
    """
    return WELL_FORMED.fullmatch(text.replace(" ", "")) is not None


def parse_equation(equation: str, operands: Sequence[Operand]) -> tuple[list[str], str]:
    """Return the labels of the axes of each operand, and of the output. Unused letters replace the ellipses.

    If the equation has no output term, the output has the axes of the ellipsis and then the labels that appear once, in
    alphabetical order.

    Raises:
        Unknown: the rank of an operand differs from its subscripts, or the ellipses have more axes than there are
            unused letters.
    """
    equation = equation.replace(" ", "")
    left, arrow, output = equation.partition("->")
    terms = left.split(",")
    hidden = [len(shape) - len(term.replace("...", "")) for term, (_, shape) in zip(terms, operands, strict=True)]
    for term, (name, shape), count in zip(terms, operands, hidden, strict=True):
        if count < 0 or (count and "..." not in term):
            raise Unknown(f"'{name}' has {len(shape)} axes, but its subscripts are '{term}'")
    if not arrow:
        labels = re.findall("[A-Za-z]", left)
        output = ("..." if "..." in left else "") + "".join(sorted(x for x in set(labels) if labels.count(x) == 1))
    most = max(hidden)
    free = "".join(label for label in ascii_letters if label not in equation)[:most]
    if len(free) < most:
        raise Unknown(f"the equation '{equation}' uses so many letters that none are left for the axes of its ellipses")
    terms = [term.replace("...", free[most - count :]) for term, count in zip(terms, hidden, strict=True)]
    return terms, output.replace("...", free)


def einsum_shape(equation: str, operands: Sequence[Operand]) -> list[Dim | None]:
    """Return the output's dimensions, with None for unknown ones.

    The size of a label is taken from all operands that have the label. onnx takes the size from the first operand only.

    Raises:
        Unknown: the equation does not fit the operands; see `parse_equation`.
    """
    terms, output = parse_equation(equation, operands)
    pairs = [pair for term, (_, shape) in zip(terms, operands, strict=True) for pair in zip(term, shape, strict=True)]
    found = [{size for label, size in pairs if label == each and size != 1} for each in output]
    known = [{size for size in sizes if len(sizes) == 1 or isinstance(size, int)} for sizes in found]
    return [1 if not sizes else ints.pop() if ints else None for sizes, ints in zip(found, known, strict=True)]
