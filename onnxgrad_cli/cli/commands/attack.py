"""`onnxgrad attack`: find adversarial inputs near given samples."""

from __future__ import annotations

from typing import Any

import click

from onnxgrad_cli.cli.parsing.click_option import option
from onnxgrad_cli.cli.parsing.sample_options import on_samples, shown
from onnxgrad_cli.cli.parsing.shared_options import (
    MODEL,
    declared_options,
    how_to_read,
    options,
    output_option,
    values_of,
)
from onnxgrad_cli.cli.terminal.console import Console, speaks, table
from onnxgrad_cli.cli.terminal.progress import working
from onnxgrad_cli.errors import wrong_value
from onnxgrad_cli.options.attack import Fooling
from onnxgrad_cli.options.data import SampleOptions


@click.command()
@MODEL
@declared_options(Fooling)
@output_option("Output file for the changed samples.  [default: nothing is written]", metavar="FILE.npz")
@option(
    "--clip",
    metavar="LOW,HIGH",
    help="Clip the changed samples to this range, on the scale of the model's input.  [default: the range of the data]",
)
@option(
    "--label", metavar="NAME", help="Name of the labels in --data.  [default: the model's predictions]", common=True
)
@option("--wrt", metavar="NAME", help="Input to change.  [default: the float input]")
@on_samples
@how_to_read
@speaks
@click.pass_obj
def attack(console: Console, /, model: str, data: str, out: str | None, clip: str | None, **values: Any) -> int:
    """Change samples slightly, so that MODEL (- is stdin) classifies them differently."""
    console.done = "attacked"
    from onnxgrad_cli.jobs.attack import run_attack

    fooling = Fooling(clip=_clip(clip), **values_of(Fooling, values))
    own = {name: values.pop(name) for name in ("label", "output")}  # these names are also options of a build
    samples, built = SampleOptions(**values_of(SampleOptions, values)), options(values)
    with working(console) as tell:
        found = run_attack(model, data, out, fooling, samples=samples, options=built, tell=tell, **own, **values)
    success = found.success
    result = {
        "method": fooling.method, "loss": fooling.loss, "what": found.words, "samples": len(found.samples),
        "success": success,
        "accuracy": {"before": found.accuracy_before, "after": found.accuracy_after},
        "distance": {"mean": float(found.distances.mean()), "largest": float(found.distances.max())},
        "vanishing": found.vanishing, "proof": found.proof._asdict(),
        "files": [str(file) for file in found.files],
    }  # fmt: skip
    rows = [
        ("samples", f"{len(found.samples):,}"),
        ("accuracy before", f"{found.accuracy_before:.1%}"),
        ("accuracy after", f"{found.accuracy_after:.1%}"),
        ("success", "no sample to attack" if success is None else f"{success:.1%}"),
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
        raise wrong_value(f"`clip={text}`: give two numbers", "such as 0,1") from None
    return low, high
