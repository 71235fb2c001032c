"""Options from a TOML file, from variables of the environment, and which of them comes first."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.test_bad_input import refused
from tests.cli.test_cli import outputs
from tests.cli_harness import (
    Shell,
)

CONFIG = """
loss = "huber"
label = "from_file"
freeze = ["b1"]
shape = { x = ["n", 4] }
no-report = true
verify = false
data = "belongs to another command.npz"

[loss-option]
delta = 0.5
"""


def test_config_file(shell: Shell) -> None:
    Path("c.toml").write_text(CONFIG)
    found = shell("build", "mlp.onnx", "--config", "c.toml", "--json")
    assert found.code == 0, found.err
    assert found.json["asked"]["options"] == {
        "--loss": "huber", "--label": "from_file", "--freeze": "b1", "--shape": "x=n, 4", "loss options": "delta=0.5",
    }  # fmt: skip
    assert found.json["proof"] is None and "mlp.train.onnx.report.md" not in shell.files()
    assert outputs("mlp.train.onnx") == ["loss", "w1_grad", "w2_grad"]


def test_environment_variables(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXGRAD_BUILD_LABEL", "from_environment")
    monkeypatch.setenv("ONNXGRAD_BUILD_FREEZE", "b1 w1")
    monkeypatch.setenv("ONNXGRAD_BUILD_DIM", "batch=2")
    options = shell("build", "mlp.onnx", "--json").json["asked"]["options"]
    assert options == {"--label": "from_environment", "--freeze": "b1, w1", "--dim": "batch=2"}


def test_which_comes_first(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line, then the environment, then the file, then the default."""
    Path("c.toml").write_text(CONFIG)

    def label(*options: str) -> str:
        found = shell("build", "mlp.onnx", "--config", "c.toml", "--json", *options)
        return str(found.json["asked"]["options"]["--label"])

    assert label() == "from_file"
    monkeypatch.setenv("ONNXGRAD_BUILD_LABEL", "from_environment")
    assert label() == "from_environment"
    assert label("--label", "typed") == "typed"
    monkeypatch.setenv("ONNXGRAD_BUILD_CONFIG", "c.toml")
    monkeypatch.delenv("ONNXGRAD_BUILD_LABEL")
    assert shell("build", "mlp.onnx", "--json").json["asked"]["options"]["--label"] == "from_file"


def test_config_with_unknown_option(shell: Shell) -> None:
    Path("c.toml").write_text('lable = "y"\n')
    refused(shell, 2, "unknown option 'lable'", "label", command=("build", "mlp.onnx", "--config", "c.toml"))
    Path("c.toml").write_text("label = \n")
    refused(shell, 2, "not TOML", command=("build", "mlp.onnx", "--config", "c.toml"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("epochs = [1, 2]", "'epochs' takes one value, not several"),
        ("epochs = {a = 1}", "'epochs' takes numbers or text, not {'a': 1}"),
        ("epochs = 1979-05-27", "'epochs' takes numbers or text, not datetime.date(1979, 5, 27)"),
        ("epochs = inf", "'inf' is not a valid integer"),
        ("train = [[1]]", "'train' takes one value, not several"),
        ("dim = {batch = {a = 1}}", "'dim' takes numbers or text"),
        ('out = "a\\u0000b"', r"'out' takes numbers or text, not 'a\x00b'"),
        ("balance = 1", "'balance' must be true or false, not 1"),
        ("resume = true", "'True' is not one of 'never', 'auto', 'must'"),
        (f"epochs = {'9' * 5000}", "is not TOML"),
        (f"epochs = {'[' * 5000}", "is not TOML"),
    ],
)
def test_config_with_values_of_other_types(shell: Shell, line: str, words: str) -> None:
    Path("c.toml").write_text(line + "\n")
    refused(shell, 2, words, command=("train", "mlp.onnx", "--data", "d.npz", "--config", "c.toml"))


def test_config_has_what_would_be_typed(shell: Shell) -> None:
    Path("c.toml").write_text(
        'label = 5\nkeep-outputs = true\ntrain = ["w1", "b*"]\nl2 = 1\nreport = "r.json"\ntrain_last = 2\n'
        "[dim]\nbatch = 3\n"
    )
    result = shell("build", "mlp.onnx", "-o", "out/train.onnx", "--config", "c.toml", "--no-verify", "--json")
    assert result.code == 0, result.err
    options = result.json["asked"]["options"]
    assert (options["--label"], options["--train"], options["--dim"]) == ("5", "w1, b*", "batch=3"), options


def test_config_has_sections_of_commands(shell: Shell) -> None:
    Path("c.toml").write_text(
        'label = "a"\n[build]\nlabel = "b"\ntrain = "w1"\n[build.dim]\nbatch = 3\n[train]\nrate = 1\n'
    )
    command = ("build", "mlp.onnx", "-o", "out/train.onnx", "--config", "c.toml", "--no-verify", "--json")
    refused = shell(*command)
    assert refused.code == 2 and refused.facts == ("unknown_name", "config", "c.toml", "rate"), (
        "what the others get is checked too"
    )
    Path("c.toml").write_text(Path("c.toml").read_text().replace("rate =", "epochs ="))
    options = shell(*command).json["asked"]["options"]
    assert (options["--label"], options["--train"], options["--dim"]) == ("b", "w1", "batch=3")
    assert shell("inspect", "mlp.onnx", "--config", "c.toml", "--json").json["asked"]["options"]["--label"] == "a"
    Path("c.toml").write_text('[biuld]\nlabel = "b"\n')
    refused = shell(*command)
    assert refused.facts == ("unknown_name", "config", "c.toml") and refused.hint.split()[-1] == "build?"
    Path("c.toml").write_text('[list]\nlabel = "b"\n')
    assert "unknown option [list] 'label'" in shell(*command).err
