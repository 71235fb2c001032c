"""`onnxgrad attack`: inputs that a model classifies otherwise than the samples that they are made from."""

from __future__ import annotations

from typing import Any, get_args

import click

from onnxgrad_cli.cli.console import Console, speaks, table
from onnxgrad_cli.cli.options import MODEL, complete_files, how_to_read, options
from onnxgrad_cli.cli.paths import TEXT
from onnxgrad_cli.cli.progress import working
from onnxgrad_cli.cli.samples import on_samples, sample_options, shown
from onnxgrad_cli.common.choices import Attack, Norm
from onnxgrad_cli.errors import UsageError

SETTINGS = ("method", "epsilon", "steps", "step_size", "norm", "targeted", "start", "seed")


@click.command(short_help="Find inputs that fool a model.")
@MODEL
@click.option(
    "--method",
    type=click.Choice(get_args(Attack)),
    default="fgsm",
    show_default=True,
    help="One step along the sign of the gradient, or several, each brought back to the samples.",
)
@click.option(
    "-o",
    "--out",
    type=TEXT,
    shell_complete=complete_files,
    metavar="FILE.npz",
    help="The new samples.  [default: nothing is written]",
)
@click.option(
    "--epsilon",
    type=click.FloatRange(min=0),
    default=0.03,
    show_default=True,
    help="The largest distance from a sample, in the numbers that the model is fed.",
)
@click.option("--steps", type=click.IntRange(min=1), help="pgd: how many.  [default: 10]")
@click.option("--step-size", type=click.FloatRange(min=0), help="pgd: how long.  [default: 2.5 epsilon / steps]")
@click.option(
    "--norm", type=click.Choice(get_args(Norm)), default="inf", show_default=True, help="What measures the distance."
)
@click.option("--targeted", metavar="N|NAME", help="Have samples taken for this class.")
@click.option("--clip", metavar="LOW,HIGH", help="The range of what the model is fed.  [default: the data's]")
@click.option("--start/--no-start", default=True, help="pgd: begin at a random place.  [default: do]")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="pgd: of random places.")
@click.option("--label", metavar="NAME", help="What --data call the labels.  [default: the model's own answers]")
@click.option("--wrt", metavar="NAME", help="The input that is changed.  [default: the one of floats]")
@on_samples
@how_to_read
@speaks
@click.pass_obj
def attack(console: Console, /, model: str, data: str, out: str | None, clip: str | None, **values: Any) -> int:
    """Change samples by little, so that MODEL (- is stdin) classifies them otherwise."""
    console.done = "attacked"
    from onnxgrad_cli.jobs.attack import Fooling, run_attack

    fooling = Fooling(clip=_clip(clip), **{name: values.pop(name) for name in SETTINGS})
    own = {name: values.pop(name) for name in ("label", "output")}  # which options of a build are called, too
    samples, built = sample_options(values), options(values)
    with working(console) as tell:
        found = run_attack(model, data, out, fooling, samples=samples, options=built, tell=tell, **own, **values)
    success = found.success
    result = {
        "method": fooling.method, "what": found.words, "samples": len(found.samples), "success": success,
        "accuracy": {"before": found.accuracy_before, "after": found.accuracy_after},
        "distance": {"mean": float(found.distances.mean()), "largest": float(found.distances.max())},
        "flat": found.flat, "proof": {"verdict": found.proof[0], "why": found.proof[1]},
        "files": [str(file) for file in found.files],
    }  # fmt: skip
    rows = [
        ("samples", f"{len(found.samples):,}"),
        ("accuracy before", f"{found.accuracy_before:.1%}"),
        ("accuracy after", f"{found.accuracy_after:.1%}"),
        ("success", "none could be moved" if success is None else f"{success:.1%}"),
        ("largest distance", f"{found.distances.max():.4g}"),
    ]
    lines = [found.words, table(("", ""), rows).strip("\n"), shown(found.proof)]
    console.result(result, "\n".join([*lines, *(f"wrote {file}" for file in found.files)]))
    return 0


def _clip(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"`clip={text}`: two numbers are wanted", "such as 0,1") from None
    return low, high
