"""`onnxgrad tune`: find the fastest gradient implementations on this machine."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from onnxgrad_cli.cli.parsing.click_option import FILE, option
from onnxgrad_cli.cli.parsing.shared_options import DIM, MODEL, options, what_to_build
from onnxgrad_cli.cli.terminal.console import Console, speaks, table
from onnxgrad_cli.cli.terminal.progress import working

HERE = (
    *("losses", "loss_options", "loss_chunks", "output"),
    *("train", "freeze", "untie", "tie", "preset", "train_last", "lora", "lora_target", "grad_of_input"),
    *("mode", "quantization", "dims", "shapes", "infer_by_run"),
)
"""Build options that decide which gradients a training model has, and at which shapes they are computed."""


@click.command()
@MODEL
@option(
    "-o",
    "--out",
    type=FILE,
    metavar="FILE.toml",
    help="Output file, for `build --tuned`.  [default: MODEL.tuned.toml]",
    common=True,
)
@option(
    "--size",
    type=DIM,
    multiple=True,
    help="Size of a symbolic dimension in the measurements.  [default: 8 on the first axis of an input, 64 on others]",
    common=True,
)
@option("--threads", type=click.IntRange(min=1), metavar="N", help="Number of CPU threads.  [default: all cores]")
@option("--repeat", type=click.IntRange(min=1), default=7, help="Number of rounds of each measurement.")
@what_to_build(only=HERE)
@speaks
@click.pass_obj
def tune(
    console: Console, /, model: str, out: Path | None, size: tuple[tuple[str, int], ...], threads: int | None,
    repeat: int, **values: Any,
) -> int:  # fmt: skip
    """Time the implementations of each gradient of MODEL, and write the names of those faster than the default.

    All implementations give the same results, up to rounding.
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
        data,
        table(("gradient", "default", "fastest", "relative time"), rows) if rows else "nothing to choose",
        asked=False,
    )
    console.say(f"wrote {file}")
    return 0
