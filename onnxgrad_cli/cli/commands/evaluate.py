"""`onnxgrad evaluate`: compute the loss and metrics of a model on data."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import click

from onnxgrad_cli.cli.parsing.click_option import together
from onnxgrad_cli.cli.parsing.sample_options import TRAINING
from onnxgrad_cli.cli.parsing.shared_options import (
    MODEL,
    data_option,
    declared_options,
    options,
    values_of,
    what_to_build,
)
from onnxgrad_cli.cli.terminal.console import Console, speaks, table
from onnxgrad_cli.cli.terminal.progress import working
from onnxgrad_cli.options.data import SampleOptions, SequenceOptions
from onnxgrad_cli.options.train import Course

if TYPE_CHECKING:
    from onnxgrad_cli.training.inference import Matrix, Setting


HERE = ("losses", "label", "output", "reduction", "loss_options", "sample_weight", "dims", "shapes")
"""The build options that have an effect on an evaluation: the losses, and the sizes of the model."""

MOST_SHOWN = 30
"""Maximum number of classes of a confusion matrix in the text output. --json shows larger ones."""

DATA = (
    "Arrays named after the inputs: .npz, .csv, .jsonl, .parquet, .safetensors, a folder of .npy files, or ONNX "
    "test_data_set_N."
)


setting_options = together(
    declared_options(SampleOptions, without=TRAINING),
    declared_options(SequenceOptions),
    declared_options(
        Course, only=("prefix", "batch_size", "provider", "threads"),
        batch_size={"help": "Samples per run of the model."},
    ),
)  # fmt: skip
"""A decorator that adds options to a command: how a model is run on data."""


def setting_of(values: dict[str, Any]) -> Setting:
    """Remove the values of the options `setting_options` from the parsed values, and return them as a `Setting`."""
    from onnxgrad_cli.training.inference import Setting

    sequences = SequenceOptions(**values_of(SequenceOptions, values))
    samples = SampleOptions(**values_of(SampleOptions, values))
    names = [field.name for field in dataclasses.fields(Setting) if field.name in values]
    return Setting(sequences=sequences, samples=samples, **{name: values.pop(name) for name in names})


@click.command()
@MODEL
@data_option(f"{DATA} They include the labels.")
@declared_options(
    Course, only=("metrics", "keep_mode"),
    metrics={"help": "Metric to measure in addition to the loss; see `onnxgrad list metrics`.",
             "metavar": "NAME[:OUTPUT]|FILE.onnx|FILE.py:FUNCTION"},
    keep_mode={"help": "Run BatchNormalization and Dropout in the mode stored in MODEL, instead of inference mode."},
)  # fmt: skip
@setting_options
@what_to_build(only=HERE)
@speaks
@click.pass_obj
def evaluate(
    console: Console, /, model: str, data: str, metrics: tuple[str, ...], keep_mode: bool, **values: Any
) -> int:
    """Measure MODEL on data: the loss, metrics and confusion matrix over all samples."""
    from onnxgrad_cli.jobs.evaluate import run_evaluate
    from onnxgrad_cli.report.formatting import figure

    setting = setting_of(values)
    metrics = values_of(Course, {"metrics": metrics}).get("metrics", ())
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


def confusion_table(output: str, matrix: Matrix) -> str:
    """Return a confusion matrix as a table with a row for each label and a column for each predicted class."""
    rows = [(name, *map(str, row)) for name, row in zip(matrix.classes, matrix.counts, strict=True)]
    return table((f"{output}: label \\ predicted", *matrix.classes), rows)
