"""`onnxgrad tune`: which forms of gradients are the fastest on this machine."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from onnxgrad_cli.cli.console import Console, speaks, table
from onnxgrad_cli.cli.options import DIM, MODEL, options, what_to_build
from onnxgrad_cli.cli.paths import FilePath
from onnxgrad_cli.cli.progress import working


@click.command(short_help="Measure which forms of gradients are the fastest here.")
@MODEL
@click.option(
    "-o",
    "--out",
    type=FilePath(dir_okay=False, path_type=Path),
    metavar="FILE.toml",
    help="The choices, for `build --tuned`.  [default: MODEL.tuned.toml]",
)
@click.option("--size", type=DIM, multiple=True, help="The size at which a symbolic dimension is measured.")
@click.option("--threads", type=click.IntRange(min=1), metavar="N", help="Of the processor.  [default: all]")
@click.option("--repeat", type=click.IntRange(min=1), default=7, show_default=True, help="Rounds of each measurement.")
@what_to_build
@speaks
@click.pass_obj
def tune(
    console: Console, /, model: str, out: Path | None, size: tuple[tuple[str, int], ...], threads: int | None,
    repeat: int, **values: Any,
) -> int:  # fmt: skip
    """Measure all forms of the gradients of MODEL that have several, and write those that are faster than the default.

    The results of a build are the same with any of them, to rounding.
    """
    console.done = "tuned"
    from onnxgrad_cli.jobs.tune import run_tune

    with working(console) as tell:
        found, file = run_tune(model, out, options(values), sizes=dict(size), threads=threads, repeat=repeat, tell=tell)
    data = {"measured": [dataclasses.asdict(each) for each in found], "file": str(file)}
    rows = [
        (each.place, each.default, each.best, f"{each.milliseconds[each.best] / each.milliseconds[each.default]:.2f}")
        for each in found
    ]
    console.result(
        data, table(("gradient", "by shape", "here", "of its time"), rows) if rows else "nothing to choose", asked=False
    )
    console.say(f"wrote {file}")
    return 0
