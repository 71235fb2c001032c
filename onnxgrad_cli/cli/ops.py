"""`onnxgrad ops`: the operators that can be differentiated."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import click

from onnxgrad_cli.cli.options import load_rules
from onnxgrad_cli.cli.voice import Voice, speaks, table


@click.command(short_help="List the operators that can be differentiated.")
@click.argument("pattern", default="*", metavar="[GLOB]")
@click.option("--rules", multiple=True, type=click.Path(dir_okay=False), metavar="FILE.py", help="Count these too.")
@speaks
@click.pass_obj
def ops(voice: Voice, pattern: str, rules: tuple[str, ...]) -> int:
    """List the operators that can be differentiated, and the convention where a derivative does not exist."""
    from onnxgrad_cli.registry import all_rules

    for file in rules:
        load_rules(Path(file))
    found = [rule for rule in all_rules() if fnmatchcase(rule.op_type.lower(), pattern.lower())]
    data = [
        {
            "op": rule.op_type,
            "domain": rule.domain or "ai.onnx",
            "versions": list(rule.versions),
            "derivative": "zero" if rule.is_zero else "rule",
            "needs_opset": rule.needs_opset,
            "kink": rule.kink,
            "source": rule.source,
        }
        for rule in found
    ]
    rows = [(r.op_type, r.domain or "ai.onnx", "zero" if r.is_zero else "rule", r.kink) for r in found]
    voice.result(data, table(("operator", "domain", "derivative", "at kinks"), rows))
    voice.say(f"{len(found)} operators, of which {sum(r.is_zero for r in found)} have a zero derivative by mathematics")
    return 0
