"""The pages for those who come from older systems name what there is: every name, command and
option exists; test_pages.py follows the links."""

import re
from pathlib import Path

import pytest

import onnxgrad_cli
from onnxgrad_cli.cli import cli

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TEXT = "".join((DOCS / page).read_text() for page in ("lineage.md", "from-onnxruntime-training.md"))


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`onnxgrad_cli\.(\w+)`", TEXT))))
def test_name(name: str) -> None:
    assert name in onnxgrad_cli.__all__
    assert getattr(onnxgrad_cli, name).__doc__


@pytest.mark.parametrize("command", sorted(set(re.findall(r"`onnxgrad ([^`]+)`", TEXT))))
def test_command(command: str) -> None:
    name, *words = command.split()
    flags = {flag for param in cli.commands[name].params for flag in param.opts}
    assert {word for word in words if word.startswith("--")} <= flags
