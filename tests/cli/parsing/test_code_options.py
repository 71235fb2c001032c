"""Code is loaded only if the command line names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.test_bad_input import BUILD, refused
from tests.cli.test_cli import outputs
from tests.cli_harness import (
    UNKNOWN_OPS,
    Shell,
    save,
)


@pytest.mark.parametrize(
    "command", [("build", "mlp.onnx", *BUILD), ("list", "operators", "relu"), ("derive", "mlp.onnx")]
)
def test_only_the_command_line_names_code(
    shell: Shell, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("rules.py").write_text("import pathlib\npathlib.Path('ran').touch()\n")
    Path("c.toml").write_text('rules = ["rules.py"]\n')
    hint = "type the option on the command line"
    refused(shell, 2, "a configuration must not", "rules.py", hint, command=(*command, "--config", "c.toml"))
    monkeypatch.setenv(f"ONNXGRAD_{command[0].upper()}_CONFIG", "c.toml")
    refused(shell, 2, "a configuration must not", "rules.py", hint, command=command)
    monkeypatch.delenv(f"ONNXGRAD_{command[0].upper()}_CONFIG")
    monkeypatch.setenv(f"ONNXGRAD_{command[0].upper()}_RULES", "rules.py")
    refused(shell, 2, "the environment must not", "rules.py", hint, command=command)
    assert not Path("ran").exists()
    assert shell(*command, "--rules", "rules.py").code == 0 and Path("ran").exists(), "who types it, means it"


def test_rules_that_fail(shell: Shell) -> None:
    Path("r.py").write_text("1 / 0\n")
    refused(shell, 2, "'r.py' fails: ZeroDivisionError", command=("build", "mlp.onnx", *BUILD, "--rules", "r.py"))
    Path("r.py").write_text("from onnxgrad_cli import rule\n@rule('Sigmoid')\ndef mine(op, g, y, x):\n    return g\n")
    refused(shell, 1, "two rules for ai.onnx::Sigmoid", command=("build", "mlp.onnx", *BUILD, "--rules", "r.py"))


def test_rules_from_a_file(shell: Shell) -> None:
    save(UNKNOWN_OPS.replace("{1, 2, 3, 4}", "{1, 2, 3, 4}, float[batch, 4] k"), Path("unknown.onnx"))
    Path("rules.py").write_text(
        "from onnxgrad_cli import rule\n"
        "@rule('Twirl Swirl', domain='my.ops')\n"
        "def twirl(op, g, y, x):\n    return g * 2\n"
    )
    from onnxgrad_cli.autodiff import registry

    with registry.scoped():
        assert shell("build", "unknown.onnx", "--rules", "rules.py", "--no-verify").code == 0
        assert [row["domain"] for row in shell("list", "operators", "twirl", "--json").json] == ["my.ops"]
    assert outputs("unknown.train.onnx") == ["loss", "b_grad"]
