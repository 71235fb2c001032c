"""The options of commands that run a model on samples: which data, and how they become what it is fed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import click

from onnxgrad_cli.cli.code import Typed, function_of
from onnxgrad_cli.cli.options import Pair, complete_files
from onnxgrad_cli.cli.paths import TEXT
from onnxgrad_cli.common.choices import Resize
from onnxgrad_cli.errors import UsageError

if TYPE_CHECKING:
    from onnxgrad_cli.training.data import SampleOptions

Command = TypeVar("Command", bound=Callable[..., Any])


class Sizes(click.ParamType[tuple[int, ...]]):
    """One size, or one for each axis."""

    name = "N[,N...]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """The sizes."""
        if isinstance(value, tuple):
            return value
        try:
            return tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is none: 4, or 4,4", param, ctx)


TRAINED = (
    "[INPUT:]imagenet|MEAN/STD|none",
    "Bring pictures or columns to mean 0 and deviation 1.  [default: as the model says that it was trained]",
)
"""How data that are not trained on are normalised: the forms, and the words."""


def columns_to_samples(forms: str, words: str) -> Callable[[Command], Command]:
    """What gives a command the options that say how what data hold becomes samples.

    Args:
        forms, words: of --normalize.
    """
    given = (
        click.option("--map", "columns", type=Pair("COLUMN=INPUT", "=", str), multiple=True,
                     help="Take this column for that input or label."),
        click.option("--normalize", multiple=True, metavar=forms, help=words),
        click.option("--resize", type=click.Choice(get_args(Resize)),
                     help="What becomes of picture files of other proportions than the input's: their edges are cut "
                     "off, or not.  [default: crop]"),
        click.option("--transform", cls=Typed, metavar="FILE.py:FUNCTION",
                     help="Change each batch, a dict of numpy arrays, by a Python function."),
    )  # fmt: skip

    def decorate(command: Command) -> Command:
        for option in reversed(given):
            command = option(command)
        return command

    return decorate


def on_samples(command: Command) -> Command:
    """Give a command the options that say which samples it runs on, and whether its gradients are proved."""
    for option in reversed((
        click.option("--data", required=True, type=TEXT, shell_complete=complete_files, metavar="DATA",
                     help="Samples, in any format of `onnxgrad train`, or a single picture, .png or .jpeg."),
        click.option("--sample", type=click.IntRange(min=0), multiple=True, metavar="N",
                     help="Take this sample alone; the first is 0."),
        click.option("--output", metavar="NAME", help="The output that is looked at.  [default: the first of floats]"),
        click.option("--prefix", default="", metavar="TEXT", help="What names in --data have before those of inputs."),
        columns_to_samples(*TRAINED),
        click.option("--verify/--no-verify", default=None, help="Prove the gradients.  [default: where it takes "
                     "seconds]"),
        click.option("--force", is_flag=True, help="Replace files that onnxgrad did not write."),
    )):  # fmt: skip
        command = option(command)
    return command


def sample_options(values: dict[str, Any], **others: Any) -> SampleOptions:
    """Take what says how data become samples out of `values`; `others` are more of its fields."""
    from onnxgrad_cli.training.data import SampleOptions

    columns, file = values.pop("columns"), values.pop("transform")
    twice = next((column for column, _ in columns if [name for name, _ in columns].count(column) > 1), None)
    if twice is not None:
        raise UsageError(f"`columns`: '{twice}' is to be two inputs", "name each column once")
    return SampleOptions(
        columns=dict(columns),
        normalize=values.pop("normalize"),
        resize=values.pop("resize"),
        transform=None if file is None else function_of(file, "--transform"),
        **others,
    )


def shown(proof: tuple[str, str]) -> str:
    """The verdict on the gradients, in a line."""
    return f"gradients {proof[0]}{f': {proof[1]}' if proof[1] else ''}"
