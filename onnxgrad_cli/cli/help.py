"""The help of a command: the common options first, and with --help-all the rest under headings.

What is shown holds nothing invisible: a configuration's values stand in it as defaults.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import click

from onnxgrad_cli.common.visible import visible_lines

MANY = 30
"""Options that --help shows without choosing."""

COMMON = frozenset(
    (
        "out out-dir jobs data val classes epochs batch-size learning-rate metric patience resume loss output label "
        "train freeze lora optimizer mode dim size verify force config json help help-all method class sample epsilon "
        "targeted"
    ).split()
)
"""The options that --help shows of a command that has many."""

FIRST, OWN = "Common options", "Options"

SECTIONS = {
    "Loss": "loss-option reduction sample-weight l1 l2",
    "What is trained": "untie tie preset train-last lora-target lora-scaling lora-dropout lora-dora grad-of-input "
    "init seed reset",
    "Optimizer": "optimizer-option group clip-norm clip-value accumulate loss-scale ema embed-state schedule",
    "How the model is read": "unbiased-variance quantization identifiers shape infer-by-run rules",
    "What is written": (
        "weights keep-outputs yield as-gradient-op training-info target recompute tuned report picture no-report "
        "artifacts nominal-checkpoint dump-passes stop-after keep-mode"
    ),
    "Data": "test-data val-prefix map normalize augment balance shuffle resize transform tokenizer max-length pack "
    "pad-id",
    "How it speaks": "verbose quiet traceback",
}
"""Heading -> the options under it; those of a command that stand nowhere here come before them."""

_HEADINGS = {name: heading for heading, names in SECTIONS.items() for name in names.split()}


class VisibleHelp(click.HelpFormatter):
    """Help in which nothing is invisible."""

    def getvalue(self) -> str:
        """The help as far as it is written."""
        return visible_lines(super().getvalue())


class VisibleContext(click.Context):
    """The context of each command."""

    formatter_class = VisibleHelp

    def get_help(self) -> str:
        """The help of the command, as far as it is common."""
        return super().get_help() if isinstance(self.command, click.Group) else help_of(self)


def help_of(ctx: click.Context, whole: bool = False) -> str:
    """The help of a command; with `whole` all its options."""
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
    """The first thing that a help says, and the default."""
    words, bracket, default = text.partition("  [default: ")
    first = re.split(r"[;:] |\. |  \[", words)[0].rstrip(".")
    return f"{first}{bracket}{default.partition('; x')[0].rstrip(']')}]" if bracket else first


def sections(ctx: click.Context) -> Iterator[tuple[str, list[click.Option]]]:
    """The options of a command by headings: all under one, or the common ones and then the rest."""
    options = [param for param in ctx.command.get_params(ctx) if isinstance(param, click.Option)]
    if len(options) <= MANY:
        yield OWN, options
        return
    yield FIRST, [option for option in options if name_of(option) in COMMON]
    rest = [option for option in options if name_of(option) not in COMMON]
    for heading in (OWN, *SECTIONS):
        under = [option for option in rest if _HEADINGS.get(name_of(option), OWN) == heading]
        if under:
            yield heading, under


def name_of(option: click.Option) -> str:
    """The long name of an option, without its dashes."""
    return max(option.opts, key=len).lstrip("-")
