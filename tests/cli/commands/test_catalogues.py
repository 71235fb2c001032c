"""`onnxgrad list operators`, and patterns that match no operator."""

from __future__ import annotations

from tests.cli_harness import Shell


def test_operators(shell: Shell) -> None:
    rows = {row["op"]: row for row in shell("list", "operators", "--json").json}
    assert rows["Relu"]["derivative"] == "rule" and rows["Relu"]["kink"]
    assert rows["Shape"]["derivative"] == "zero"
    assert [row["op"] for row in shell("list", "operators", "relu", "--json").json] == ["Relu"]


def test_a_pattern_that_names_no_operator(shell: Shell) -> None:
    result = shell("list", "operators", "Rellu*")
    assert (
        (result.code, result.out) == (2, "") and result.facts == ("unknown_name", "Rellu*") and "Relu " in result.hint
    )
    assert result.facts == ("unknown_name", "Rellu*") and "Relu " in result.hint
