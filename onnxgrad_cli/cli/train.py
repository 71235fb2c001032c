"""`onnxgrad train`: from a model and data to a better model."""

from __future__ import annotations

import dataclasses
import math
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from onnxgrad_cli.cli.code import TypedFunction, metric_name
from onnxgrad_cli.cli.console import Console, speaks
from onnxgrad_cli.cli.failures import failure
from onnxgrad_cli.cli.options import MODEL, complete_files, complete_names, options, what_to_build
from onnxgrad_cli.cli.paths import TEXT, FilePath
from onnxgrad_cli.cli.progress import training
from onnxgrad_cli.cli.samples import columns_to_samples, sample_options
from onnxgrad_cli.common.byte_sizes import bytes_of
from onnxgrad_cli.common.choices import LogForm, Resume
from onnxgrad_cli.errors import OnnxgradError

if TYPE_CHECKING:
    from onnxgrad_cli.jobs.train import Trained
    from onnxgrad_cli.training.distributed.communicator import Communicator

NOT_HERE = {
    "yield",
    "keep_outputs",
    "grad_of_input",
    "training_info",
    "as_gradient_op",
    "identifiers",
    "embed_state",
}
"""What says how a training model is written, which a run keeps to itself."""


@click.command(short_help="Train a model on data.")
@MODEL
@click.option(
    "--data",
    type=TEXT,
    shell_complete=complete_files,
    required=True,
    metavar="DATA",
    help="Arrays named after the inputs and the label: .npz, .csv, .jsonl, .parquet, .safetensors, a folder of .npy "
    "files, or ONNX test_data_set_N; a folder of pictures, FOLDER/CLASS/1.png; or one of Hugging Face's datasets.",
)
@columns_to_samples(
    "[INPUT:]auto|imagenet|MEAN/STD|none",
    "Bring pictures or columns to mean 0 and deviation 1; auto: as the training data have them. The trained model says "
    "so in its metadata.",
)
@click.option(
    "--augment",
    metavar="flip,crop",
    help="Change pictures at random in training: flip left and right, move by up to an eighth.",
)
@click.option(
    "--shuffle/--no-shuffle",
    default=True,
    help="Shuffle the samples in each epoch, or keep the order of the data.  [default: --shuffle]",
)
@click.option("--balance", is_flag=True, help="Draw samples so that all classes are seen alike often.")
@click.option(
    "--tokenizer",
    type=FilePath(path_type=Path),
    metavar="FILE|DIR",
    help="A tokenizer.json, by which text in the data becomes tokens: messages, prompt and completion, or text.",
)
@click.option(
    "--max-length", type=click.IntRange(min=2), metavar="TOKENS", help="Leave out what lies behind in a sample."
)
@click.option(
    "--classes", type=click.IntRange(min=1), metavar="N", help="Give the last layer another size, with new weights."
)
@click.option("--reset", multiple=True, metavar="GLOB", help="Draw these weights anew, too.")
@click.option("--pack", is_flag=True, help="Put samples one after the other into rows of --max-length tokens.")
@click.option("--pad-id", type=click.IntRange(min=0), metavar="TOKEN", help="What stands behind the end of a sample.")
@click.option(
    "--val",
    type=TEXT,
    shell_complete=complete_files,
    metavar="DATA|FRACTION",
    help="Judge each epoch on these data, or on a random share of --data such as 0.2, which is not trained on; and "
    "take the best epoch's weights.",
)
@click.option("--prefix", default="", metavar="TEXT", help="What names in --data have before the inputs' names.")
@click.option("--val-prefix", default="", metavar="TEXT", help="What names in --val have before the inputs' names.")
@click.option(
    "-o",
    "--out",
    type=TEXT,
    shell_complete=complete_files,
    metavar="FILE",
    help="The trained model.  [default: MODEL.trained.onnx]",
)
@click.option(
    "--adapter",
    type=TEXT,
    metavar="FILE.safetensors|FILE.onnx_adapter|FOLDER",
    help="Write the adapters of --lora alone, too: in onnxgrad's form, in that of onnxruntime, or as a folder of PEFT.",
)
@click.option(
    "--adapter-from",
    type=FilePath(path_type=Path),
    metavar="FILE|FOLDER",
    help="Begin with these adapters, in any of the three forms, which then say what --lora does.",
)
@click.option("--epochs", type=click.IntRange(min=1), default=10, show_default=True, help="How often all is seen.")
@click.option("--max-steps", type=click.IntRange(min=1), metavar="N", help="End after N steps, if epochs are more.")
@click.option("--batch-size", type=click.IntRange(min=1), default=32, show_default=True, help="Samples of a step.")
@click.option(
    "--lr",
    "--learning-rate",
    "learning_rate",
    type=float,
    default=1e-3,
    show_default=True,
    metavar="RATE",
    help="Learning rate; the peak value if the schedule warms up.",
)
@click.option(
    "--schedule",
    default="constant",
    shell_complete=complete_names("training.schedules", "SCHEDULES"),
    show_default=True,
    metavar="NAME[:KEY=VALUE,...]",
    help="How the rate changes, such as cosine or step; see `onnxgrad schedules`. All schedules accept warmup=N.",
)
@click.option(
    "--metric",
    "metrics",
    cls=TypedFunction,
    shell_complete=complete_names("training.metrics", "METRICS"),
    multiple=True,
    metavar="NAME|FILE.onnx|FILE.py:FUNCTION",
    help="Measure it on --val. The first one named says which epoch is best; where none is, the loss does.  "
    "[default: what suits the loss]",
)
@click.option("--patience", type=click.IntRange(min=1), metavar="N", help="End after N epochs without a better one.")
@click.option(
    "--eval-every",
    type=click.IntRange(min=0),
    default=0,
    metavar="STEPS",
    help="Judge every so many steps too, which is told and logged; the best epoch goes by the ends of epochs.",
)
@click.option(
    "--log",
    type=click.Choice(get_args(LogForm)),
    multiple=True,
    help="Write the log to the run's folder in this form too: train.csv, or a folder for TensorBoard.",
)
@click.option(
    "--save-every",
    type=click.IntRange(min=0),
    default=0,
    metavar="STEPS",
    help="Write a checkpoint every so many steps, besides that after each epoch.",
)
@click.option(
    "--memory",
    metavar="SIZE",
    help="What a step may take, such as 500MB, beyond what the process and its data take: what to compute again, and "
    "how many runs a step takes, is chosen so.",
)
@click.option(
    "--picture",
    type=FilePath(dir_okay=False, path_type=Path),
    metavar="FILE.html",
    help="Draw the training model on a page, to which the run's report in HTML links.",
)
@click.option("--use-ema", is_flag=True, help="Judge and write the averages that --ema keeps, not the last weights.")
@click.option(
    "--run",
    type=FilePath(file_okay=False, path_type=Path),
    metavar="DIR",
    help="The folder of checkpoints and train.jsonl.  [default: OUT.run]",
)
@click.option(
    "--resume",
    is_flag=False,
    flag_value="must",
    type=click.Choice(get_args(Resume)),
    default="never",
    show_default=True,
    help="Continue from the checkpoint of the run. auto: begin a run without a checkpoint, and do nothing after a "
    "finished run. --resume alone means must.",
)
@click.option("--new-data", is_flag=True, help="Go on with other training data than the run was begun with.")
@click.option("--provider", default="cpu", show_default=True, help="The execution provider of onnxruntime.")
@click.option("--threads", type=click.IntRange(min=1), metavar="N", help="Of the processor.  [default: all]")
@click.option(
    "--keep-mode",
    is_flag=True,
    help="Leave BatchNormalization and Dropout as the model has them; else what is written is for inference.",
)
@click.option(
    "--force", is_flag=True, help="Replace the run of an earlier training, and files that onnxgrad did not write."
)
@what_to_build
@speaks
@click.pass_obj
def train(console: Console, /, model: str, data: str, out: str | None, seed: int | None, **values: Any) -> int:
    """Train MODEL on data, on onnxruntime alone, and write it with the weights found: same graph, opset and names."""
    console.done = "trained"
    from onnxgrad_cli.jobs.train import Course, run_train
    from onnxgrad_cli.training.data import SequenceOptions

    sequences = SequenceOptions(**{field.name: values.pop(field.name) for field in dataclasses.fields(SequenceOptions)})
    changes = tuple(each.strip() for each in (values.pop("augment") or "").split(",") if each.strip())
    samples = sample_options(values, augment=changes, balance=values.pop("balance"))
    values["metrics"] = tuple(metric_name(text) for text in values["metrics"])
    if values["memory"] is not None:
        values["memory"] = bytes_of(values["memory"], "`memory`")
    names = [field.name for field in dataclasses.fields(Course) if field.name in values]
    course = Course(seed=seed or 0, sequences=sequences, samples=samples, **{name: values.pop(name) for name in names})
    where = {
        name: values[name]
        for name in ("val", "adapter", "adapter_from", "run", "resume", "new_data", "log", "picture", "force")
    }
    with _together(console) as link:
        built = options({**values, "seed": seed})
        with training(console) as watch:
            found = run_train(
                model, data, out, built, course, tell=console.say, watch=watch, communicator=link, **where
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
    console.say("interrupted: the checkpoint holds it all, --resume goes on")
    return 130


train.params = [param for param in train.params if param.name not in NOT_HERE]


@contextmanager
def _together(console: Console) -> Iterator[Communicator]:
    """Connect this process to those that a launcher has started with it. Only rank 0 prints.

    If one process fails, all end, and one of them prints the error.
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
            if link.world > 1:  # an interrupt may reach one process after another one has stopped all
                _ignore_interrupts()
            link.broadcast(None)  # the others end after rank 0 has written all files
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
    """Return the error that is printed for an exception."""
    from onnxgrad_cli.training.distributed.communicator import RankError

    if isinstance(error, RankError):
        return error
    found = failure(error)
    told = OnnxgradError(found.message, found.hint, found.details)
    told.exit_code = found.code
    return told


def _summary(found: Trained, curves: bool) -> str:
    """Return the curves of the losses and the epoch whose weights were taken. Each epoch has had its line by then."""
    if not found.epochs:
        return "no epoch was completed"
    return "\n".join([*(_curves(found.epochs) if curves else ()), _taken(found)])


def _taken(found: Trained) -> str:
    """The epoch whose weights were taken, and why."""
    from onnxgrad_cli.report.words import figure

    value = f", {figure(found.epochs[found.best - 1][found.by])}" if found.by else ""
    mark = f"best by {found.by.replace('val_', 'validation ')}" if found.by else "the last, taken"
    return f"epoch {found.best} of {len(found.epochs)}, {mark}{value}"


def _curves(epochs: Sequence[dict[str, float]]) -> Iterator[str]:
    """A line for each loss, where the terminal has the characters for it."""
    from onnxgrad_cli.report.curve import BLOCKS, blocks
    from onnxgrad_cli.report.words import figure

    try:
        BLOCKS.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return
    for name in ("loss", "val_loss"):
        values = [epoch[name] for epoch in epochs if name in epoch]
        if len(values) > 1 and all(map(math.isfinite, values)):
            first, last = figure(values[0]), figure(values[-1])
            yield f"{name.replace('val_', 'validation '):15}  {blocks(values)}  {first} to {last}"
