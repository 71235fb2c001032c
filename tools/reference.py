"""The reference pages: the command line from click, the Python names from `onnxgrad_cli.__all__`."""

import ast
import inspect
from collections.abc import Iterator
from html import escape
from pathlib import Path

import click

import onnxgrad_cli
from onnxgrad_cli.cli import cli
from onnxgrad_cli.cli.completion import VARIABLE
from onnxgrad_cli.cli.help import sections

FOLDER = Path(__file__).parents[1] / "docs" / "reference"

# The heading under which the names of a package stand; a package that is not named here gets its own name.
HEADINGS = {
    "builder": "Building a training model",
    "options": "Building a training model",
    "losses": "Building a training model",
    "optimizers": "Building a training model",
    "passes": "Building a training model",
    "common": "Building a training model",
    "files": "Building a training model",
    "record": "Building a training model",
    "jobs": "From files to files",
    "training": "Training step by step",
    "derivatives": "Derivatives without a loss",
    "autodiff": "Rules and definitions",
    "emission": "Rules and definitions",
    "verification": "Proofs and reports",
    "report": "Proofs and reports",
    "compat": "For users of older systems",
    "errors": "Errors",
}


VARIABLES = {
    "`ONNXGRAD_COMMAND_OPTION`": "is an option: `ONNXGRAD_BUILD_LOSS=mae` is `onnxgrad build --loss mae`. Of a flag "
    "1 or 0; of an option that can be repeated several values, separated by blanks",
    "`NO_COLOR`": "set to anything: no colours",
    "`TERM`": "`dumb`: no colours, and nothing that moves",
    "`COLUMNS`": "how wide help, tables and lines are, in place of what the terminal says",
    "`GITHUB_ACTIONS`": "`true`: errors and warnings are annotated, and names give no commands to the runner",
    "`GITHUB_STEP_SUMMARY`": "the file to which a workflow's table is added",
    f"`{VARIABLE}`": "set by the scripts of `onnxgrad completion` alone",
}
"""The variables of the environment that the command heeds."""


def command_line() -> str:
    """The page of the command line: each command with its text, its usage and a table of its options."""
    head = [
        "# Command line",
        "",
        "Every command, as `onnxgrad COMMAND --help-all` prints it. `make docs` writes this page from the commands.",
        "",
        "`--help` shows the common options of a command that has many, `--help-all` all. `--json` prints what a",
        "command says in [one shape](output.schema.json) ([explained](../how-to/automation.md#json)).",
        "",
        "Every option, but for those that name code to run, can also stand in a TOML file (`--config FILE.toml`),",
        "above all tables for all commands or under `[build]` for one, or in the environment. What is typed goes",
        "before the environment, and that before the file.",
        "",
        "| variable | what it does |",
        "| --- | --- |",
        *(f"| {name} | {meaning} |" for name, meaning in VARIABLES.items()),
        "",
        "| exit code | meaning |",
        "| --- | --- |",
        "| 0 | done |",
        "| 1 | failed |",
        "| 2 | usage: the command was called wrongly |",
        "| 3 | the model is not differentiable, or something in it is not supported |",
        "| 4 | a check failed |",
        "| 130 | interrupted |",
    ]
    context = click.Context(cli, info_name="onnxgrad", **cli.context_settings)
    body = [line for name in cli.list_commands(context) for line in _command(name, context)]
    return "\n".join([*head, *body, ""])


def _command(name: str, parent: click.Context) -> Iterator[str]:
    command = cli.commands[name]
    context = click.Context(command, info_name=name, parent=parent)
    usage = command.get_usage(context).removeprefix("Usage: ")
    text = inspect.cleandoc(command.help or "").replace("\b\n", "")
    yield from ("", f"## onnxgrad {name}", "", text, "", "```text", usage, "```")
    found = list(sections(context))
    for heading, options in found:
        yield from ("", f"**{heading}**") if len(found) > 1 else ()
        yield from ("", "| option | what it does |", "| --- | --- |")
        for option in options:
            flags, meaning = option.get_help_record(context) or ("", "")
            yield f"| <code>{_cell(flags)}</code> | {_cell(meaning)} |"


def _cell(text: str) -> str:
    """A text as a table's cell, which both Python-Markdown and forges show as it is."""
    return escape(" ".join(text.split()), quote=False).translate({ord(sign): f"&#{ord(sign)};" for sign in "[]|*_"})


def python() -> str:
    """The page of the Python names: one mkdocstrings entry for each name of `__all__`, by package."""
    groups: dict[str, list[str]] = {heading: [] for heading in HEADINGS.values()}
    for name, module in sorted(_homes().items(), key=lambda home: home[0].lower()):
        package = module.split(".")[1]
        groups.setdefault(HEADINGS.get(package, package), []).append(name)
    head = [
        "# Python",
        "",
        "Everything that `import onnxgrad_cli` offers; other names are not promised to stay. `make docs` writes this",
        "page from `onnxgrad_cli.__all__`, and the site shows each name's docstring.",
    ]
    body = [
        line
        for heading, names in groups.items()
        if names
        for line in ("", f"## {heading}", *(each for name in names for each in ("", f"::: onnxgrad_cli.{name}")))
    ]
    return "\n".join([*head, *body, ""])


def _homes() -> dict[str, str]:
    """The module of each public name, read from the imports that `onnxgrad_cli` shows to type checkers."""
    tree = ast.parse(Path(onnxgrad_cli.__file__).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: node.module or "" for node in imports for alias in node.names}
    return {name: homes[name] for name in onnxgrad_cli.__all__ if name != "__version__"}


def files() -> dict[Path, str]:
    """What this module writes: the path of each page, and its text."""
    return {FOLDER / "command-line.md": command_line(), FOLDER / "python.md": python()}
