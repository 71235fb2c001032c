"""`onnxgrad check`: the proof of a training model or a model of derivatives, at any later time."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from onnxgrad_cli.cli.console import Console, speaks
from onnxgrad_cli.cli.options import DIM
from onnxgrad_cli.common.visible import visible
from onnxgrad_cli.errors import CheckFailed


@click.command(short_help="Prove the gradients of a training model, or derivatives.")
@click.argument("train", metavar="TRAIN")
@click.option(
    "--data",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.npz",
    help="Arrays for its inputs and weights, by name.  [default: random ones]",
)
@click.option(
    "--original",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="MODEL",
    help="The model that it was made from: compare the two; second derivatives need it.",
)
@click.option("--dim", type=DIM, multiple=True, help="Size of a symbolic dimension of random data.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of random data and directions.")
@speaks
@click.pass_obj
def check(
    console: Console, train: str, data: Path | None, original: Path | None, dim: tuple[tuple[str, int], ...], seed: int
) -> int:
    """Prove the gradients of TRAIN (- is stdin), which `onnxgrad build` or `onnxgrad derive` made, by differences."""
    from onnxgrad_cli.jobs.check import run_check
    from onnxgrad_cli.verification.proof import NOT_PROVED, PROVED

    proof = run_check(train, data=data, original=original, sizes=dict(dim), seed=seed, tell=console.say)
    console.done = proof.verdict
    lines = [visible(f"{step.status:8}{step.name}: {step.detail} ({step.seconds:.2f} s)") for step in proof.steps]
    console.result(dataclasses.asdict(proof), "\n".join(lines))
    if proof.verdict == NOT_PROVED:
        console.say(f"not proved: {proof.why}")
    return 0 if proof.verdict == PROVED else CheckFailed.exit_code
