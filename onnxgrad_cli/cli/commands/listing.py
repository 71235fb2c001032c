"""`onnxgrad list`: list the losses, optimizers, metrics, schedules, passes and operators."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from onnxgrad_cli.cli.commands import catalogues
from onnxgrad_cli.cli.parsing.code_options import load_rules
from onnxgrad_cli.cli.parsing.shared_options import rules as rules_option
from onnxgrad_cli.cli.terminal.console import Console, speaks, table
from onnxgrad_cli.errors import conflict

KINDS: dict[str, tuple[str, Callable[[str], catalogues.Listing]]] = {
    "losses": ("losses, the labels they expect, and their settings (--loss, --loss-option)", catalogues.losses),
    "optimizers": ("optimizers, their state and settings (--optimizer, --optimizer-option)", catalogues.optimizers),
    "metrics": ("metrics and their settings (--metric)", catalogues.metrics),
    "schedules": ("schedules of the learning rate and their settings (--schedule)", catalogues.schedules),
    "passes": ("passes of a build, in order (--dump-passes, --stop-after)", catalogues.passes),
    "operators": ("operators: what has a gradient, the convention at kinks, and what is refused", catalogues.operators),
}


@click.command("list")
@click.argument("kind", metavar="[KIND]", type=click.Choice(list(KINDS)), required=False)
@click.argument("pattern", metavar="[GLOB]", default="*")
@rules_option("Load gradient rules from a Python file first, for `onnxgrad list operators`.")
@speaks
@click.pass_obj
def listing(console: Console, /, kind: str | None, pattern: str, rules: tuple[str, ...]) -> int:
    """List the losses, optimizers, metrics, schedules, passes or operators, or those whose name matches GLOB.

    Without KIND, list the kinds.
    """
    if rules and kind != "operators":
        raise conflict("`rules` applies only to `onnxgrad list operators`", "leave --rules out")
    if kind is None:
        rows = [(name, text) for name, (text, _) in KINDS.items()]
        console.result([{"name": name, "summary": text} for name, text in rows], table(("kind", "lists"), rows))
        return 0
    for file in rules:
        load_rules(Path(file))
    found = KINDS[kind][1](pattern)
    console.result(found.data, found.text)
    if found.note:
        console.say(found.note)
    return 0
