"""Format the help of a command: the common options first; with --help-all, also the others, under headings.

Invisible characters are escaped, because values of a configuration are shown as defaults.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import click

from onnxgrad_cli.cli.parsing.click_option import SectionOption
from onnxgrad_cli.common.escape import escaped_lines

MAX_OPTIONS = 30
"""Maximum number of options of a command for which --help shows all, not only the common ones."""

FIRST, OWN = "Common options", "Options"
"""The heading above the common options in the help, and the heading above options without a section."""

SECTIONS = (
    "Loss", "Trained parameters", "Optimizer", "Evaluation", "Data", "Memory", "Reading the model", "Runtime", "Output",
    "Logging",
)  # fmt: skip
"""The headings above options that are neither common nor without a section, in the order of the help."""


class VisibleHelp(click.HelpFormatter):
    """A click help formatter that escapes invisible characters."""

    def getvalue(self) -> str:
        """Return the help that was written so far."""
        return escaped_lines(super().getvalue())


class VisibleContext(click.Context):
    """The click context of each command, which formats its help as this module does."""

    formatter_class = VisibleHelp

    def get_help(self) -> str:
        """Return the help of the command, with the common options only if there are many."""
        return super().get_help() if isinstance(self.command, click.Group) else help_of(self)


def help_of(ctx: click.Context, whole: bool = False) -> str:
    """Return the help of a command; with `whole`, all its options."""
    formatter, command = ctx.make_formatter(), ctx.command
    command.format_usage(ctx, formatter)
    command.format_help_text(ctx, formatter)
    found = dict(sections(ctx))
    short = FIRST in found and not whole
    for heading, options in found.items():
        if heading == FIRST or not short:
            records = [record for option in options if (record := option.get_help_record(ctx))]
            with formatter.section(heading):
                formatter.write_dl([(flags, _brief(text)) for flags, text in records] if short else records)
    rest = sum(len(options) for heading, options in found.items() if heading != FIRST)
    if short:
        formatter.write_paragraph()
        formatter.write_text(f"{rest} more options: {ctx.command_path} --help-all")
    command.format_epilog(ctx, formatter)
    return formatter.getvalue().rstrip("\n")


def _brief(text: str) -> str:
    """Return the first clause of an option's help, and its default."""
    words, bracket, default = text.partition("  [default: ")
    first = re.split(r"[;:] |\. |  \[", words)[0].rstrip(".")
    return f"{first}{bracket}{re.split(r'; x|]  .x', default)[0].rstrip(']')}]" if bracket else first


def sections(ctx: click.Context) -> Iterator[tuple[str, list[click.Option]]]:
    """Yield pairs (heading, options). If a command has many options, the common ones come first."""
    options = [param for param in ctx.command.get_params(ctx) if isinstance(param, click.Option)]
    if len(options) <= MAX_OPTIONS:
        yield OWN, options
        return
    yield FIRST, [option for option in options if _is_common(option)]
    rest = [option for option in options if not _is_common(option)]
    for heading in ("", *SECTIONS):
        under = [option for option in rest if getattr(option, "section", "") == heading]
        if under:
            yield heading or OWN, under


def _is_common(option: click.Option) -> bool:
    return not isinstance(option, SectionOption) or option.common  # --help is an option of click itself
