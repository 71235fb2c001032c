"""Write docs/operators.md: every operator with its rule and the tests that prove it."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from onnxgrad_cli.autodiff.registry import NEWEST_OPSET
from onnxgrad_cli.cli.commands.catalogues import DERIVATIVES, PLAIN_KINDS
from onnxgrad_cli.verification.coverage import Coverage, coverage

PAGE = Path(__file__).parents[1] / "docs" / "operators.md"


def document(found: Sequence[Coverage]) -> str:
    """Return the page of the operators."""
    kinds = Counter(c.kind for c in found)
    lines = [
        "# Operators",
        "",
        f"This page lists every operator of ai.onnx up to opset {NEWEST_OPSET}, newer operators that are "
        "defined by means of older ones, and every supported operator of other domains. `make docs` writes it.",
        "",
        *markdown_table(
            ("how", "operators", "meaning"), [(kind, kinds[kind], text) for kind, text in DERIVATIVES.items()]
        ),
        "",
        "Columns:",
        "",
        "- *versions*: the versions of the operator's schema. Versions in brackets are converted first.",
        "- *operands*: the inputs with a gradient. *zero*: the inputs whose derivative is zero.",
        "- *proof*: the number of rows in the tests' table, and the published node tests with a right gradient. Each "
        "row is compared with central differences in float64, in first and second order, with static and symbolic "
        "axes. Rows in definitions/, and tests without rows, compare values with onnxruntime's kernel, and gradients "
        "with differences or PyTorch.",
        "",
        *markdown_table(
            ("operator", "versions", "how", "operands", "zero", "at kinks and ties", "proof"), map(_row, found)
        ),
        "",
        "## Differences from the standard's tags",
        "",
        "The standard tags the inputs of its operators as differentiable or not. onnxgrad differs in these cases:",
        "",
        *markdown_table(("operator", "input", "tag", "onnxgrad"), _differing(found)),
        "",
        "## Refused",
        "",
        "An error names the node and the reason, and nothing is written. Refused operators:",
        "",
        *markdown_table(("operator", "reason"), [(_link(c), c.reason) for c in found if c.kind == "refused"]),
        "",
        "Refused operands:",
        "",
        *markdown_table(("operator", "input", "reason"), _refused(found)),
        "",
        "Refused cases among the published node tests, with the number of their forms:",
        "",
        *markdown_table(
            ("operator", "reason", "forms"), [(_link(c), why, n) for c in found for why, n in c.refusals.items()]
        ),
    ]
    return "\n".join(lines) + "\n"


def _link(c: Coverage) -> str:
    name = c.op_type if not c.domain else f"{c.domain}.{c.op_type}"
    return f"[{name}]({c.page})" if c.page else name


def _row(c: Coverage) -> tuple[str, ...]:
    how = f"{c.kind}: `{c.source.removeprefix('onnxgrad_cli.')}`" if c.source else c.kind
    gradient = ", ".join(o.name for o in c.operands if o.state == "gradient")
    zero = ", ".join(o.name for o in c.operands if o.state == "zero" and c.kind not in ("zero", "no float"))
    return _link(c), _versions(c), how, gradient, zero, c.kink, _proof(c)


def _versions(c: Coverage) -> str:
    """Return the versions of an operator's schema. Older versions, which are converted first, are in parentheses."""
    older = " ".join(str(version) for version, kind in c.versions.items() if kind == "converted")
    own = [str(version) for version, kind in c.versions.items() if kind != "converted"]
    return " ".join([f"({older})"] * bool(older) + own)


def _proof(c: Coverage) -> str:
    """Return the number of rows and the files that test the operator, and the number of published node tests."""
    # Other files use the operator, but don't test it.
    own = [file for file in c.files if c.rows or "/definitions/" in file or "/prepare/" in file]
    files = ", ".join(file.removeprefix("tests/") for file in own or c.files)
    proof = [f"{c.rows} rows in {files}" if c.rows else files] if files else []
    if c.cases:
        proof.append(f"{c.cases.get('right', 0)} of {sum(c.cases.values())} node tests")
    return "; ".join(proof)


def _differing(found: Sequence[Coverage]) -> list[tuple[str, ...]]:
    return [(_link(c), o.name, o.tag, o.word or o.state) for c in found for o in c.operands if o.agrees is False]


def _refused(found: Sequence[Coverage]) -> list[tuple[str, ...]]:
    return [
        (_link(c), o.name, o.word)
        for c in found
        if c.kind not in PLAIN_KINDS
        for o in c.operands
        if o.state == "refused"
    ]


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return rows as the lines of a Markdown table."""
    lines = [" | ".join(str(cell).replace("|", "\\|") for cell in row) for row in rows]
    return (
        [f"| {line} |" for line in (" | ".join(head), " | ".join("---" for _ in head), *lines)] if lines else ["None."]
    )


def files() -> dict[Path, str]:
    """Return the path of the page, and its text."""
    return {PAGE: document(list(coverage()))}
