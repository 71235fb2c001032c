"""`onnxgrad evaluate`: how good a model is on data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from onnxgrad_cli.cli.code import TypedFunction, metric_name
from onnxgrad_cli.cli.console import Console, speaks, table
from onnxgrad_cli.cli.options import MODEL, complete_files, complete_names, options, what_to_build
from onnxgrad_cli.cli.paths import TEXT, FilePath
from onnxgrad_cli.cli.progress import working
from onnxgrad_cli.cli.samples import TRAINED, columns_to_samples, sample_options

if TYPE_CHECKING:
    from onnxgrad_cli.training.inference import Matrix, Setting

Command = TypeVar("Command", bound=Callable[..., Any])

HERE = {"loss", "label", "output", "reduction", "loss_option", "sample_weight", "dim", "shape", "rules"}
"""What of a training model says what is measured, and of which sizes the model is."""

MOST_SHOWN = 30
"""Of more classes a confusion matrix is told as JSON alone."""

DATA = (
    "Arrays named after the inputs: .npz, .csv, .jsonl, .parquet, .safetensors, a folder of .npy files, or ONNX sets."
)


def setting_options(command: Command) -> Command:
    """Give a command the options that say how a model is run on data."""
    for option in reversed((
        click.option("--prefix", default="", metavar="TEXT",
                     help="What names in --data have before the inputs' names."),
        columns_to_samples(*TRAINED),
        click.option("--tokenizer", type=FilePath(path_type=Path), metavar="FILE|DIR",
                     help="A tokenizer.json, by which text in the data becomes tokens."),
        click.option("--max-length", type=click.IntRange(min=2), metavar="TOKENS",
                     help="Leave out what lies behind in a sample."),
        click.option("--pack", is_flag=True, help="Put samples one after the other into rows of --max-length tokens."),
        click.option("--pad-id", type=click.IntRange(min=0), metavar="TOKEN",
                     help="What stands behind the end of a sample."),
        click.option("--batch-size", type=click.IntRange(min=1), default=32, show_default=True,
                     help="Samples that are taken at once."),
        click.option("--provider", default="cpu", show_default=True, help="The execution provider of onnxruntime."),
        click.option("--threads", type=click.IntRange(min=1), metavar="N", help="Of the processor.  [default: all]"),
    )):  # fmt: skip
        command = option(command)
    return command


def setting_of(values: dict[str, Any]) -> Setting:
    """The setting that those options say, which are taken out of the values."""
    from onnxgrad_cli.training.data import SequenceOptions
    from onnxgrad_cli.training.inference import Setting

    sequences = SequenceOptions(**{field.name: values.pop(field.name) for field in dataclasses.fields(SequenceOptions)})
    samples = sample_options(values)
    names = [field.name for field in dataclasses.fields(Setting) if field.name in values]
    return Setting(sequences=sequences, samples=samples, **{name: values.pop(name) for name in names})


@click.command(short_help="Measure a model on data.")
@MODEL
@click.option(
    "--data",
    required=True,
    type=TEXT,
    shell_complete=complete_files,
    metavar="DATA",
    help=f"{DATA} Labels are among them.",
)
@click.option(
    "--metric",
    "metrics",
    cls=TypedFunction,
    shell_complete=complete_names("training.metrics", "METRICS"),
    multiple=True,
    metavar="NAME[:OUTPUT]|FILE.onnx|FILE.py:FUNCTION",
    help="What is measured besides the loss; see `onnxgrad metrics`.  [default: what suits the loss]",
)
@click.option(
    "--keep-mode",
    is_flag=True,
    help="Leave BatchNormalization and Dropout as the model has them; else they are for inference.",
)
@setting_options
@what_to_build
@speaks
@click.pass_obj
def evaluate(
    console: Console, /, model: str, data: str, metrics: tuple[str, ...], keep_mode: bool, **values: Any
) -> int:
    """Measure MODEL on data: the loss, metrics, and which class is taken for which, over all samples."""
    from onnxgrad_cli.jobs.evaluate import run_evaluate
    from onnxgrad_cli.report.words import figure

    setting, metrics = setting_of(values), tuple(map(metric_name, metrics))
    with working(console) as tell:
        found = run_evaluate(
            model, data, options(values), metrics=metrics, setting=setting, keep_mode=keep_mode, tell=tell
        )
    rows = [(name, figure(value)) for name, value in found.results.items()]
    console.found = ", ".join(f"{name} {value}" for name, value in rows)
    lines = [table(("", f"{found.samples:,} samples"), rows)]
    for output, matrix in found.confusion.items():
        if 1 < len(matrix.classes) <= MOST_SHOWN:
            lines += ["", confusion_table(output, matrix)]
    console.result(dataclasses.asdict(found), "\n".join(lines))
    return 0


NOT_HERE = {param.name for param in what_to_build(click.Command("any")).params} - HERE
evaluate.params = [param for param in evaluate.params if param.name not in NOT_HERE]


def confusion_table(output: str, matrix: Matrix) -> str:
    """A confusion matrix: a row for each label, a column for each class that was chosen."""
    rows = [(name, *map(str, row)) for name, row in zip(matrix.classes, matrix.counts, strict=True)]
    return table((f"{output}: label \\ chosen", *matrix.classes), rows)
