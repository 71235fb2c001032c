"""Differentiate the node tests that the onnx package publishes, and report which gradients are right.

`python -m tests.conformance` checks every case, writes build/conformance.md and the package's file of proofs, and fails
if any gradient is wrong. A case counts as refused if a single input is refused, even if the other inputs are right.
Each case is also checked for each target and with recomputation, as in `onnxgrad build`. A case whose verdict is worse
with these options than without counts as wrong.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import onnx

from onnxgrad_cli.ir.domains import full_name
from onnxgrad_cli.options import Options, RecomputeSpec
from onnxgrad_cli.targets import STANDARD, TARGETS
from tests import proofs
from tests.autodiff.test_backend_nodes import (
    BESIDE,
    FILES,
    KINDS,
    NOT,
    PUBLISHED,
    REFUSED,
    RIGHT,
    WRONG,
    Verdict,
    by_case,
    verdicts,
)  # fmt: skip

REPORT = Path("build/conformance.md")

PLAIN = Options()

VARIANTS = {
    **{f"--target {name}": Options(target=name) for name in TARGETS if name != STANDARD},
    "--recompute elementwise": Options(recompute=RecomputeSpec("elementwise")),
}
"""Options of `onnxgrad build` that change how gradients are written -> the options as an object."""

PEERS = """\
| tool | right | wrong |
| --- | ---: | ---: |
| onnx-ad 0.3.0 | 88 % | 36 |
| onnxruntime-training 1.19.2 | 28 % | 24 |
"""
"""Results of other tools on the same cases, each with the operators and opsets that it supports."""


def judge(file: str) -> list[Verdict]:
    return verdicts(file, lambda name: True, [PLAIN, *VARIANTS.values()])


def report(every: Sequence[Verdict], seconds: float) -> str:
    """Return the report in Markdown."""
    found = _with(every, PLAIN)
    cases = by_case(found)
    kinds = Counter(cases.values())
    run = sum(kinds.values()) - kinds[NOT]
    right = kinds[RIGHT] + kinds[BESIDE]
    lines = [
        "# The published node tests, differentiated",
        "",
        f"Of {len(cases)} cases with a float input and a float output, {run} could be measured: "
        f"{right} right ({100 * right / max(run, 1):.1f} %), {kinds[REFUSED]} refused, {kinds[WRONG]} wrong. "
        f"onnx {onnx.__version__}, {seconds:.0f} s.",
        "",
        "A case is right if every float output through every float input is: random cotangents, against central "
        "differences of an executor that reproduces the published outputs; beside a kink if it stands on one. "
        "It counts as refused if one of its inputs is that the standard does not tag as non-differentiable. "
        "Forms are the case as published, with its other inputs as constants, and with symbolic axes.",
        "",
        PEERS,
        "## By operator",
        "",
        *_counts(("cases", [(op, kind) for (op, _), kind in cases.items()])),
        "",
        "## Forms",
        "",
        *_counts(("forms", [(verdict.subject.op, verdict.kind) for verdict in found])),
    ]
    for words, options in VARIANTS.items():
        lines += ["", f"## With {words}", "", *_changed(words, _with(every, options))]
    lines += ["", "## Wrong", "", *_reasons(v for v in every if v.kind == WRONG)]
    for title, kind in (("Refused", REFUSED), ("Not evaluable", NOT)):
        lines += ["", f"## {title}", "", *_reasons(v for v in found if v.kind == kind)]
    return "\n".join(lines) + "\n"


def _with(every: Sequence[Verdict], options: Options) -> list[Verdict]:
    return [verdict for verdict in every if verdict.subject.options == options]


def _changed(words: str, found: Sequence[Verdict]) -> list[str]:
    """Return the number of forms whose nodes changed with the options. Only these forms test the options."""
    right = [verdict for verdict in found if verdict.kind in (RIGHT, BESIDE)]
    other = Counter(verdict.subject.op for verdict in right if verdict.changed)
    return [
        f"With {words}, {other.total()} of the {len(right)} right forms came out as other nodes than without: "
        f"{', '.join(f'{op} {count}' for op, count in other.items()) or 'none'}."
    ]


def _counts(named: tuple[str, Sequence[tuple[str, str]]]) -> list[str]:
    title, pairs = named
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for op, kind in pairs:
        counts[op][kind] += 1
    counts["**all**"] = sum(counts.values(), Counter())
    head = [f"| {title} of | " + " | ".join(KINDS) + " |", "| --- |" + " ---: |" * len(KINDS)]
    rows = (f"| {op} | " + " | ".join(str(count[kind] or "") for kind in KINDS) + " |" for op, count in counts.items())
    return [*head, *rows]


def _reasons(found: Iterable[Verdict]) -> list[str]:
    reasons: dict[tuple[str, str], list[str]] = defaultdict(list)
    for verdict in found:
        reasons[verdict.subject.op, verdict.why].append(str(verdict.subject))
    if not reasons:
        return ["None."]
    rows = (
        f"| {op} | {why.replace('|', ' ')} | {len(subjects)} | {subjects[0]} |"
        for (op, why), subjects in sorted(reasons.items())
    )
    return ["| operator | why | forms | the first of them |", "| --- | --- | ---: | --- |", *rows]


def published(found: Sequence[Verdict]) -> dict[str, Any]:
    """Return the entries for the file of proofs: cases, operands, outputs and reasons of refusals by operator."""
    result: dict[str, Any] = {}
    own = [verdict for verdict in found if not verdict.subject.op.endswith(", expanded")]
    names = {v.subject.op: full_name(v.subject.op, v.subject.model.graph.node[0].domain) for v in own}
    for op, name in names.items():
        kinds = Counter(kind for (of, _), kind in by_case(own).items() if of == op)
        kinds[RIGHT] += kinds.pop(BESIDE, 0)
        mine = [verdict for verdict in own if verdict.subject.op == op]
        told = [v.subject for v in mine if v.kind in (RIGHT, BESIDE, REFUSED) and v.subject.form.startswith(PUBLISHED)]
        operands = [pair for s in told for pair in proofs.operands(s.model, op, s.wanted).items()]
        outputs = [pair for s in told for pair in proofs.outputs(s.model, op, s.wanted).items()]
        result[name] = {
            "cases": {kind: kinds[kind] for kind in KINDS if kinds[kind]},
            "operands": dict(sorted(proofs.merged(operands).items())),
            "outputs": dict(sorted(proofs.merged(outputs).items())),
            "refusals": dict(sorted(Counter(v.why for v in mine if v.kind == REFUSED).items())),
        }
    return dict(sorted(result.items()))


def main() -> int:
    """Check every case on all processors. Return 1 if a case is wrong or there are no cases, and 0 otherwise."""
    start = time.monotonic()
    with ProcessPoolExecutor() as workers:
        found = [verdict for each in workers.map(judge, FILES) for verdict in each]
    if not found:
        print("the onnx package has no node tests: install the one that pyproject.toml names", file=sys.stderr)
        return 1
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(report(found, time.monotonic() - start))
    proofs.update(published=published(_with(found, PLAIN)))
    print(REPORT.read_text())
    print(f"written to {REPORT}", file=sys.stderr)
    wrong = [verdict for verdict in found if verdict.kind == WRONG]
    for verdict in wrong:
        words = next((words for words, options in VARIANTS.items() if options == verdict.subject.options), "no option")
        print(f"wrong, with {words}: {verdict.subject.op}: {verdict.subject}: {verdict.why}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
