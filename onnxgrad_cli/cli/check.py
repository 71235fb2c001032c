"""`onnxgrad check`: the proof of a training model or a model of derivatives, at any later time."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from onnxgrad_cli.cli.console import Console, speaks
from onnxgrad_cli.cli.options import DIM, proof_data
from onnxgrad_cli.cli.paths import FilePath
from onnxgrad_cli.cli.progress import working
from onnxgrad_cli.cli.several import run_several, takes_several, the_only
from onnxgrad_cli.common.visible import visible
from onnxgrad_cli.errors import CheckFailed


@click.command(short_help="Prove the gradients of a training model, or derivatives.")
@takes_several("TRAIN...")
@proof_data(
    "--data",
    "Arrays for the inputs and weights of TRAIN, by name: an .npz, or the first samples of data that `onnxgrad train` "
    "reads; of several models, for all, or one for each.  [default: random ones]",
    multiple=True,
)
@click.option(
    "--original",
    type=FilePath(dir_okay=False, path_type=Path),
    metavar="MODEL",
    help="The model that they were made from: compare the two; second derivatives need it.",
)
@click.option("--dim", type=DIM, multiple=True, help="Size of a symbolic dimension of random data.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of random data and directions.")
@speaks
@click.pass_obj
def check(
    console: Console, models: tuple[str, ...], jobs: int, data: tuple[Path, ...], tokenizer: Path | None,
    original: Path | None, dim: tuple[tuple[str, int], ...], seed: int,
) -> int:  # fmt: skip
    """Prove the gradients of each TRAIN (- is stdin), made by `onnxgrad build` or `onnxgrad derive`, by differences."""
    console.done = "proved"
    if len(models) > 1:
        return run_several(console, models, jobs, each={"data": data})
    from onnxgrad_cli.jobs.check import run_check
    from onnxgrad_cli.verification.verdict import NOT_PROVED, PROVED

    with working(console) as tell:
        proof = run_check(
            models[0], data=the_only("data", data), tokenizer=tokenizer, original=original, sizes=dict(dim), seed=seed,
            tell=tell,
        )  # fmt: skip
    console.done = proof.verdict
    lines = [visible(f"{step.status:8}{step.name}: {step.detail} ({step.seconds:.2f} s)") for step in proof.steps]
    failures = [f"{step.name}: {step.detail}" for step in proof.steps if step.status == "failed"]
    console.result(dataclasses.asdict(proof), "\n".join(lines), asked=False)
    if proof.verdict != PROVED:
        console.failed(f"{proof.verdict}: {proof.why}" if proof.why else proof.verdict, details=failures)
    if proof.verdict == NOT_PROVED:
        console.say(f"not proved: {proof.why}")
    return 0 if proof.verdict == PROVED else CheckFailed.exit_code
