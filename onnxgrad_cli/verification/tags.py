"""The differentiability tags of the standard, held against what is proven of each operand.

The standard tags inputs and outputs of its operators as differentiable or not. Here the tag is one witness; the others
are the registry and the numerical proofs that the tests have left, and where they differ the proofs count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from onnxgrad_cli.verification.coverage import Coverage, Operand

VERDICTS = {
    "agree": "the tag says what is proven",
    "tag missing": "there is no tag, and it is known what it should be",
    "tag wrong": "the tag says the contrary of what is proven",
    "unproven": "nothing is proven: it is refused, or no test reaches it",
}


SHOULD_BE = {"gradient": "differentiable", "zero": "non-differentiable", "no float": "non-differentiable"}
"""The tag that follows from what is known of an operand."""


@dataclass(frozen=True)
class Tag:
    """The tag of one input or output of an operator, and what comes of it.

    Attributes:
        op_type, domain, page: the operator.
        side: 'input' or 'output'.
        operand: the name in the schema.
        tag: 'differentiable', 'non-differentiable', or "" where there is none.
        found: what is known: see `coverage.Operand.state`.
        should_be: the tag that follows from it; "" where nothing does.
        verdict: one of VERDICTS.
        evidence: how many rows and published cases prove it, or why it is zero or refused.
    """

    op_type: str
    domain: str
    page: str
    side: str
    operand: str
    tag: str
    found: str
    should_be: str
    verdict: str
    evidence: str


def tags(found: Iterable[Coverage]) -> Iterator[Tag]:
    """The tags of every operator that the standard defines, inputs before outputs."""
    for covered in found:
        for side, operands in (("input", covered.operands), ("output", covered.outputs)):
            for operand in operands if covered.outputs else ():
                yield _tag(covered, side, operand)


def _tag(covered: Coverage, side: str, operand: Operand) -> Tag:
    """The tag of one operand, with the verdict on it."""
    should_be = SHOULD_BE.get(operand.state, "")
    right = "agree" if operand.tag == should_be else "tag wrong"
    return Tag(
        covered.op_type,
        covered.domain,
        covered.page,
        side,
        operand.name,
        operand.tag,
        operand.state,
        should_be,
        "unproven" if not should_be else right if operand.tag else "tag missing",
        _evidence(covered, operand),
    )


def _evidence(covered: Coverage, operand: Operand) -> str:
    """What the verdict on an operand's tag rests on, in words."""
    if operand.state == "no float":
        return "it holds no floating-point numbers"
    if operand.state == "zero":
        alone = "no floating-point value goes in, or none comes out" if covered.kind == "no float" else ""
        return alone or covered.kink or "its derivative is 0 wherever it has one"
    if operand.state == "refused":
        return covered.reason or operand.word
    if operand.state != "gradient":
        return "no row and no published case reaches it"
    if covered.kind == "converted":
        return "written as another operator, which is proven"
    parts = [f"a gradient in {_count(operand.rows, 'row')}"] if operand.rows else []
    parts += [f"{_count(cases, 'published case')} right"] if (cases := covered.cases.get("right", 0)) else []
    return "; ".join(parts) or f"compared in {', '.join(covered.files)}"


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"
