"""Errors name arguments of Python, which the command line shows as flags."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import click
import onnx
import pytest

import onnxgrad_cli
from onnxgrad_cli import Options, compat, errors
from onnxgrad_cli.cli import cli
from onnxgrad_cli.common.flags import FLAGS, as_cli_flags
from onnxgrad_cli.options.declare import declared
from tests.cli_harness import Shell
from tests.test_api import model

PACKAGE = Path(onnxgrad_cli.__file__).parent


FIELDS = list(declared(Options))


def flags() -> set[str]:
    commands = [command for command in cli.commands.values()]
    found = [param for command in commands for param in command.params if isinstance(param, click.Option)]
    return {flag for param in found for flag in (*param.opts, *param.secondary_opts)}


def test_every_field_has_its_flag() -> None:
    known = flags()
    assert set(FIELDS) <= FLAGS.keys()
    assert {FLAGS[name] for name in FIELDS} <= known


CALLS = {name for name, each in vars(errors).items() if isinstance(each, partial)} | {
    "CheckFailed", "Unknown", "Refusal", "matching", "make_folder", "_refuse_taken", "refuse", "require",
}  # fmt: skip
"""Calls whose arguments are texts of errors, besides the classes of errors."""


def raised() -> Iterator[tuple[str, str]]:
    """Yield the texts of all errors outside the command line, with file and line. Formatted values are shown as {}."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.is_relative_to(PACKAGE / "cli"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, (ast.Name, ast.Attribute)):
                continue
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            if name.endswith("Error") or name in CALLS:
                for text in (*node.args, *(keyword.value for keyword in node.keywords)):
                    parts = text.values if isinstance(text, ast.JoinedStr) else [text]
                    words = [str(p.value) if isinstance(p, ast.Constant) else "{}" for p in parts]
                    yield f"{path.relative_to(PACKAGE)}:{text.lineno}", "".join(words)


def test_errors_name_arguments_and_each_has_a_flag() -> None:
    known, unknown, seen = flags(), set(), 0
    public = [getattr(package, name) for package in (onnxgrad_cli, compat) for name in package.__all__]
    settings = {"base_momentum", "max_momentum"}  # of a schedule, as base-momentum=0.85
    of_programs = {name for each in filter(inspect.isfunction, public) for name in inspect.signature(each).parameters}
    for where, text in raised():
        without_commands = re.sub(r"`onnxgrad [^`]*`", "", text)
        assert not re.search(r"(?<![\w-])--(?!rules)[a-z]", without_commands), f"{where} names a flag: {text}"
        for name in re.findall(r"`([a-z][a-z0-9_]*)(?:=[^`]*)?`", text):
            unknown |= set() if FLAGS.get(name) in known or name in of_programs | settings else {(where, name)}
            seen += 1
    assert not unknown
    assert seen > 100


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("`mode='Train'` is wrong", "--mode Train is wrong"),
        ("add `optimizer=NAME`", "add --optimizer NAME"),
        ("`yield_` and `losses` and `dims`", "--yield and --loss and --dim"),
        ("`embed_state=False`", "--no-embed-state"),
        ("replace it with `force=True`", "replace it with --force"),
        ("`grad_of_input='*'`", "--grad-of-input '*'"),
        ("a value called `relu`", "a value called `relu`"),
        ("`onnxgrad train --use-ema` writes them", "`onnxgrad train --use-ema` writes them"),
    ],
)
def test_the_console_reads_arguments_as_flags(text: str, told: str) -> None:
    assert as_cli_flags(text) == told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--clip-norm", "-1"], "error: Invalid value for '--clip-norm': -1.0 is not in the range x>0."),
        (["--ema", "2", "--optimizer", "adam"], "error: Invalid value for '--ema': 2.0 is not in the range 0<=x<1."),
        (["--ema", "0.9"], "error: --ema requires an optimizer\nhint: choose an optimizer with --optimizer NAME"),
        (["--lora", "0"], "error: --lora: a rank of 0 leaves nothing to train"),
        (["--train", "q"], "error: --train: 'q' matches no float weight"),
        (["--l1", "nan"], "error: --l1 nan: expected a finite number of 0 or more"),
        (["--dim", "q=3"], "error: --dim: no input has a dimension 'q'"),
    ],
)
def test_the_command_tells_the_same_in_flags(arguments: list[str], told: str, shell: Shell) -> None:
    onnx.save(model(), "net.onnx")
    result = shell("build", "net.onnx", *arguments)
    assert result.code == 2 and told in result.err


def test_a_report_of_the_library_names_flags_whatever_was_imported(tmp_path: Path) -> None:
    code = "from onnxgrad_cli import inspect; print(inspect('net.onnx').diagnosis.proof)"
    text = '<ir_version: 10, opset_import: ["" : 18]> g (int64[n] i, float[m] x) => (float[k] y) { y = Gather(x, i) }'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "net.onnx")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "--test-data FILE.npz" in done.stdout and "`" not in done.stdout
