"""`onnxgrad list`: the kinds of names, and the names of each kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from onnxgrad_cli.cli.commands.listing import KINDS
from tests.cli_harness import Shell


@pytest.mark.parametrize("kind", KINDS)
def test_lists(shell: Shell, kind: str) -> None:
    result, found = shell("list", kind), shell("list", kind, "--json").json
    key = "op" if kind == "operators" else "name"
    assert result.code == 0
    assert len(found) > 3
    assert all(row[key] in result.out for row in found)
    assert "onnxgrad" not in result.out.splitlines()[0]
    name = found[-1][key]
    assert {row[key] for row in shell("list", kind, f"{name[:-1].upper()}?", "--json").json} >= {name}
    result = shell("list", kind, "no-such-name")
    assert (result.code, result.out) == (2, "") and result.facts == ("unknown_name", "no-such-name")


def test_the_kinds_are_listed(shell: Shell) -> None:
    assert [row["name"] for row in shell("list", "--json").json] == list(KINDS)
    assert [line.split()[0] for line in shell("list").out.splitlines()[1:]] == list(KINDS)
    result = shell("list", "layers")
    assert result.code == 2 and result.facts == ("wrong_value", "[KIND]", "layers", *KINDS)


def test_rules_are_of_operators(shell: Shell) -> None:
    Path("rules.py").touch()
    result = shell("list", "losses", "--rules", "rules.py")
    assert result.code == 2 and result.facts == ("conflict", "rules")
