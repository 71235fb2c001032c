"""`onnxgrad train`: train a model on data."""

from __future__ import annotations

import dataclasses
import math
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, get_args

import click

from onnxgrad_cli.cli.parsing.click_option import ANY_PATH, FILE, FOLDER, TEXT, option
from onnxgrad_cli.cli.parsing.shared_options import (
    MODEL,
    complete_files,
    declared_options,
    options,
    output_option,
    values_of,
    what_to_build,
)
from onnxgrad_cli.cli.terminal.console import Console, speaks
from onnxgrad_cli.cli.terminal.failures import failure
from onnxgrad_cli.cli.terminal.progress import training
from onnxgrad_cli.common.choices import LogForm, Resume
from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.options.data import SampleOptions, SequenceOptions
from onnxgrad_cli.options.train import DEFAULT_OPTIMIZER, NOT_OF_TRAINING, Course

if TYPE_CHECKING:
    from onnxgrad_cli.jobs.train import Trained
    from onnxgrad_cli.training.distributed.communicator import Communicator


@click.command()
@MODEL
@option(
    "--data",
    type=TEXT,
    shell_complete=complete_files,
    required=True,
    multiple=True,
    metavar="[SET=]DATA",
    help="Training data, with arrays named after the inputs and the label: .npz, .csv, .jsonl, .parquet, .safetensors, "
    "or a folder of .npy files or ONNX test_data_set_N. It may also be a folder of pictures (FOLDER/CLASS/1.png) or a "
    "Hugging Face dataset. Samples may differ in size. To train on several data sets, repeat the option with a name "
    "for each set, and name the set of each loss: --data SET=DATA --loss SET=LOSS. An epoch is one pass over the first "
    "set.",
    common=True,
)
@declared_options(Course, only=("epochs", "batch_size", "learning_rate"))
@declared_options(
    SampleOptions,
    normalize={
        "metavar": "[INPUT:]auto|imagenet|MEAN/STD|none",
        "shown": "",
        "help": "Subtract a mean from pictures or columns, and divide them by a standard deviation; auto computes both "
        "from --data. The trained model stores both in its metadata.",
    },
)
@declared_options(SequenceOptions)
@option(
    "--val",
    type=TEXT,
    shell_complete=complete_files,
    metavar="[SET=]DATA|FRACTION",
    help="Validation data, or the fraction of --data to hold out, such as 0.2. The weights of the best epoch are "
    "written. If there are several training sets, SET is the one whose losses are evaluated, by default the first.",
    common=True,
)
@output_option("Output file of the trained model.  [default: MODEL.trained.onnx]")
@option(
    "--adapter",
    type=TEXT,
    metavar="FILE.safetensors|FILE.onnx_adapter|FOLDER",
    help="Also write the adapters of --lora to a file of their own, in the format of onnxgrad, of onnxruntime, or of "
    "PEFT (a folder).",
)
@option(
    "--adapter-from",
    type=ANY_PATH,
    metavar="FILE|FOLDER",
    help="Start from the adapters in a file or folder, in any format of --adapter. If --lora is not set, they define "
    "the rank and the scaling.",
)
@option(
    "--log",
    type=click.Choice(get_args(LogForm)),
    multiple=True,
    help="Also write the log to the run's folder in this format: train.csv, or a folder for TensorBoard.",
)
@option(
    "--picture",
    type=FILE,
    metavar="FILE.html",
    help="Draw the training model on an HTML page. The run's HTML report links to it.",
    section="Output",
)
@declared_options(Course, without=("epochs", "batch_size", "learning_rate"))
@option(
    "--run",
    type=FOLDER,
    metavar="DIR",
    help="Folder for the checkpoints, the log and the report of the run.  [default: OUT.run]",
)
@option(
    "--resume",
    is_flag=False,
    flag_value="must",
    type=click.Choice(get_args(Resume)),
    default="never",
    help="Continue the run from its checkpoint. must: fail without a checkpoint. auto: without a checkpoint, "
    "start a new run; do nothing if the run is finished. --resume without a value means `must`.",
    common=True,
)
@option(
    "--new-data",
    is_flag=True,
    help="With --resume: allow other training data than before, with the same number of samples.",
)
@option(
    "--force",
    is_flag=True,
    help="Replace the run of an earlier training, and files that onnxgrad did not write.",
    common=True,
)
@what_to_build(
    without=NOT_OF_TRAINING,
    optimizer={"help": "Optimizer of the training; see `onnxgrad list optimizers`.", "shown": DEFAULT_OPTIMIZER},
)
@speaks
@click.pass_obj
def train(
    console: Console, /, model: str, data: Sequence[str], out: str | None, seed: int | None, **values: Any
) -> int:
    """Train MODEL on data with onnxruntime only, and write the trained model with the same graph, opset and names."""
    console.done = "trained"
    from onnxgrad_cli.jobs.train import run_train
    from onnxgrad_cli.jobs.train.data_set_names import typed_sets
    from onnxgrad_cli.losses.spec import split_set

    sequences = SequenceOptions(**values_of(SequenceOptions, values))
    samples = SampleOptions(**values_of(SampleOptions, values))
    course = Course(
        seed=seed or 0, init=values.pop("init"), sequences=sequences, samples=samples, **values_of(Course, values)
    )
    where = {
        name: values[name]
        for name in ("val", "adapter", "adapter_from", "run", "resume", "new_data", "log", "picture", "force")
    }
    data_set, val = split_set(where["val"] or "")
    where["val"] = {data_set: val} if data_set else val or None
    with _together(console) as link:
        built = options({**values, "seed": seed})
        with training(console) as watch:
            found = run_train(
                model, typed_sets(data), out, built, course, tell=console.say, watch=watch, communicator=link, **where
            )
    if link.rank:
        return 0 if found.reason != "stopped" else 130
    said = {**dataclasses.asdict(found), "files": [str(file) for file in found.files]}
    console.found = f"trained: {_taken(found)}" if found.epochs else ""
    finished = found.reason != "stopped" and not found.files
    console.result(said, _summary(found, curves=not finished), asked=False)
    for file in found.files:
        console.say(f"wrote {file}")
    if found.reason != "stopped":
        return 0
    console.say("interrupted: the checkpoint contains the whole state; --resume continues the run")
    return 130


@contextmanager
def _together(console: Console) -> Iterator[Communicator]:
    """Connect this process to the other processes that a launcher has started. Only rank 0 prints.

    If one process fails, all processes end, and one of them prints the error.
    """
    from onnxgrad_cli.training.distributed import connected

    with connected(console.say) as link:
        console.mute = link.rank > 0
        if console.mute:
            console.level = -1
        elif link.world > 1:
            console.say(f"{link.world} processes train together")
        try:
            yield link
            if link.world > 1:  # an interrupt may reach one process after another process has stopped all
                _ignore_interrupts()
            link.broadcast(None)  # the other processes end after rank 0 has written all files
        except BaseException as error:
            console.at_failure = link.abort
            if link.world > 1:  # launchers interrupt all processes if one ends
                _ignore_interrupts()
            own = _told(error)
            reported = link.fail(own)
            console.mute = reported is None
            if reported is None or reported is own:
                raise
            raise reported from None


def _ignore_interrupts() -> None:
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def _told(error: BaseException) -> OnnxgradError:
    """Return the error to print for an exception."""
    from onnxgrad_cli.training.distributed.communicator import RankError

    if isinstance(error, RankError):
        return error
    problem, code = failure(error)
    told = OnnxgradError(problem.message, problem.hint, problem.details, code=problem.code)
    told.exit_code = code
    return told


def _summary(found: Trained, curves: bool) -> str:
    """Return the text at the end of a training: the curves of the losses, and the epoch whose weights were kept."""
    if not found.epochs:
        return "no epoch was completed"
    return "\n".join([*(_curves(found.epochs) if curves else ()), _taken(found)])


def _taken(found: Trained) -> str:
    """Return a line that names the epoch whose weights were kept, and the reason."""
    from onnxgrad_cli.report.formatting import figure

    value = f", {figure(found.epochs[found.best - 1][found.by])}" if found.by else ""
    mark = f"best by {found.by.replace('val_', 'validation ')}" if found.by else "the last one"
    return f"epoch {found.best} of {len(found.epochs)}, {mark}{value}"


def _curves(epochs: Sequence[dict[str, float]]) -> Iterator[str]:
    """Yield a line with the curve of each loss, if the encoding of stdout has the characters for curves."""
    from onnxgrad_cli.report.curve import BLOCKS, blocks
    from onnxgrad_cli.report.formatting import figure

    try:
        BLOCKS.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return
    for name in ("loss", "val_loss"):
        values = [epoch[name] for epoch in epochs if name in epoch]
        if len(values) > 1 and all(map(math.isfinite, values)):
            first, last = figure(values[0]), figure(values[-1])
            yield f"{name.replace('val_', 'validation '):15}  {blocks(values)}  {first} to {last}"
