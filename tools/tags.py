"""Compare the differentiability tags of the standard with the results of tests, for each operand of each operator.

The standard tags inputs and outputs of its operators as differentiable or not. Each tag is compared with the registry
of rules and with the numerical results of the tests. If they differ, the results of the tests decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from onnxgrad_cli.verification.coverage import Coverage, OperandCoverage

VERDICTS = {
    "agree": "the tag agrees with the proofs",
    "tag missing": "the standard has no tag, and the proofs show the right one",
    "tag wrong": "the tag contradicts the proofs",
    "unproven": "nothing is proven: the operand is refused, or no test covers it",
}


SHOULD_BE = {"gradient": "differentiable", "zero": "non-differentiable", "no float": "non-differentiable"}
"""State of an operand, see `coverage.OperandCoverage.state` -> the tag that it should have."""


@dataclass(frozen=True)
class Tag:
    """The tag of one input or output of an operator, and the verdict on it.

    Attributes:
        op_type, domain: the operator.
        page: the address of the operator's page.
        side: 'input' or 'output'.
        operand: the name of the input or output in the schema.
        tag: 'differentiable', 'non-differentiable', or "" if the standard has no tag.
        found: the state of the operand, see `coverage.OperandCoverage.state`.
        should_be: the tag that follows from the state; "" if nothing is proven.
        verdict: a key of `VERDICTS`.
        evidence: the number of rows and published cases that prove a gradient, or the reason for a zero derivative or
            a refusal.
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
    """Yield the tags of every operator that the standard defines, inputs before outputs."""
    for covered in found:
        for side, operands in (("input", covered.operands), ("output", covered.outputs)):
            for operand in operands if covered.outputs else ():
                yield _tag(covered, side, operand)


def _tag(covered: Coverage, side: str, operand: OperandCoverage) -> Tag:
    """Return the tag of one operand with the verdict on it."""
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


def _evidence(covered: Coverage, operand: OperandCoverage) -> str:
    """Return the evidence for the verdict on an operand's tag, in words."""
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
