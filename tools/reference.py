"""Write the reference pages: the command line from click, and the Python names from `onnxgrad_cli.__all__`."""

import ast
import inspect
from collections.abc import Iterator
from html import escape
from pathlib import Path
from types import ModuleType

import click

import onnxgrad_cli
from onnxgrad_cli import compat
from onnxgrad_cli.cli import VARIABLE, cli
from onnxgrad_cli.cli.parsing.help import sections

FOLDER = Path(__file__).parents[1] / "docs" / "reference"

# Package -> the heading for its names. For other packages, the heading is the name of the package.
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
    "`ONNXGRAD_COMMAND_OPTION`": "sets an option: `ONNXGRAD_BUILD_LOSS=mae` is `onnxgrad build --loss mae`. Flags take "
    "1 or 0. Repeatable options take values separated by spaces",
    "`NO_COLOR`": "any value: no colours",
    "`TERM`": "`dumb`: no colours and no moving progress bars",
    "`COLUMNS`": "width of help, tables and lines, instead of the terminal's width",
    "`GITHUB_ACTIONS`": "`true`: print errors and warnings as GitHub annotations. Names are escaped, so they can't "
    "inject workflow commands",
    "`GITHUB_STEP_SUMMARY`": "file to which each command appends a table, for the summary of a workflow step",
    f"`{VARIABLE}`": "`bash_source`, `zsh_source` or `fish_source`: print the [completion script](../index.md#install) "
    "of the shell",
}
"""The environment variables of the command, with their effect."""


def command_line() -> str:
    """Return the page of the command line: each command with its description, its usage and a table of its options."""
    head = [
        "# Command line",
        "",
        "Every command, as `onnxgrad COMMAND --help-all` prints it. `make docs` writes this page from the commands.",
        "",
        "`--help` shows the common options of a command, and `--help-all` shows all. `--json` prints the result as one",
        "JSON document ([schema](output.schema.json), [explanation](../how-to/automation.md#json)).",
        "",
        "Every option can also be set in a TOML file (`--config FILE.toml`) or in the environment, except options that",
        "name code to run. In the file, options for all commands come first; options for one command go in its table,",
        "such as `[build]`. The command line overrides the environment, and the environment overrides the file.",
        "",
        "| variable | effect |",
        "| --- | --- |",
        *(f"| {name} | {meaning} |" for name, meaning in VARIABLES.items()),
        "",
        "| exit code | meaning |",
        "| --- | --- |",
        "| 0 | done |",
        "| 1 | failed, for example because a file is missing, or can't be read or written |",
        "| 2 | wrong usage: an option or argument does not exist, or its value does not fit |",
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
        yield from ("", "| option | effect |", "| --- | --- |")
        for option in options:
            flags, meaning = option.get_help_record(context) or ("", "")
            yield f"| <code>{_cell(flags)}</code> | {_cell(meaning)} |"


def _cell(text: str) -> str:
    """Return a text as a table cell, escaped so that Python-Markdown and GitHub show it literally."""
    return escape(" ".join(text.split()), quote=False).translate({ord(sign): f"&#{ord(sign)};" for sign in "[]|*_"})


def python() -> str:
    """Return the page of the Python names: an mkdocstrings entry for each name of `__all__`, by package."""
    groups: dict[str, list[str]] = {heading: [] for heading in HEADINGS.values()}
    for offered in (onnxgrad_cli, compat):
        for name, module in sorted(_homes(offered).items(), key=lambda home: home[0].lower()):
            package = module.split(".")[1]
            groups.setdefault(HEADINGS.get(package, package), []).append(f"{offered.__name__}.{name}")
    head = [
        "# Python",
        "",
        "`onnxgrad_cli` and `onnxgrad_cli.compat` export these names; only these are stable. The modules that create",
        "results define their types. `make docs` writes this page, and the site shows each name's docstring.",
    ]
    body = [
        line
        for heading, names in groups.items()
        if names
        for line in ("", f"## {heading}", *(each for name in names for each in ("", f"::: {name}")))
    ]
    return "\n".join([*head, *body, ""])


def _homes(package: ModuleType) -> dict[str, str]:
    """Return the module of each public name of a package, from the import statements in its `__init__.py`."""
    tree = ast.parse(Path(str(package.__file__)).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: node.module or "" for node in imports for alias in node.names}
    return {name: homes[name] for name in package.__all__ if name != "__version__"}


def files() -> dict[Path, str]:
    """Return the path of each page, and its text."""
    return {FOLDER / "command-line.md": command_line(), FOLDER / "python.md": python()}
