"""`onnxgrad check`: check the gradients of a training model, or the results of a model of derivatives."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from onnxgrad_cli.cli.batch import run_several, takes_several, the_only
from onnxgrad_cli.cli.parsing.click_option import FILE, option
from onnxgrad_cli.cli.parsing.shared_options import DIM, proof_data
from onnxgrad_cli.cli.terminal.console import Console, speaks
from onnxgrad_cli.cli.terminal.document import Problem
from onnxgrad_cli.cli.terminal.progress import working
from onnxgrad_cli.common.escape import escaped
from onnxgrad_cli.common.flags import status_text
from onnxgrad_cli.errors import CheckFailed


@click.command()
@takes_several("TRAIN...")
@proof_data(
    "--data",
    "Arrays for the inputs and weights of TRAIN, by name: an .npz, or the first samples of data that `onnxgrad train` "
    "reads. With several models, give one for all of them, or one for each.  [default: random inputs]",
    multiple=True,
)
@option(
    "--original",
    type=FILE,
    metavar="MODEL",
    help="Inference model from which TRAIN was built. The outputs of both are compared. Required to check second "
    "derivatives.",
)
@option("--dim", type=DIM, multiple=True, help="Size of a symbolic dimension in random inputs.", common=True)
@option("--seed", type=click.IntRange(min=0), default=0, help="Seed of random inputs and of the directions checked.")
@speaks
@click.pass_obj
def check(
    console: Console, models: tuple[str, ...], jobs: int, data: tuple[Path, ...], tokenizer: Path | None,
    original: Path | None, dim: tuple[tuple[str, int], ...], seed: int,
) -> int:  # fmt: skip
    """Check each TRAIN (- is stdin), a model of `onnxgrad build` or `onnxgrad derive`, against finite differences."""
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
    console.done = verdict = status_text(proof.verdict)
    lines = [escaped(f"{step.status:8}{step.name}: {step.detail} ({step.seconds:.2f} s)") for step in proof.steps]
    failures = [f"{step.name}: {step.detail}" for step in proof.steps if step.status == "failed"]
    console.result(dataclasses.asdict(proof), "\n".join(lines), asked=False)
    if proof.verdict != PROVED:
        console.failed(Problem("check_failed", f"{verdict}: {proof.why}" if proof.why else verdict, details=failures))
    if proof.verdict == NOT_PROVED:
        console.say(f"{verdict}: {proof.why}")
    return 0 if proof.verdict == PROVED else CheckFailed.exit_code
