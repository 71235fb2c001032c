"""Options of commands that run a model on samples: the data, and the conversion of data to inputs."""

from __future__ import annotations

from typing import Any

import click

from onnxgrad_cli.cli.parsing.click_option import option, together
from onnxgrad_cli.cli.parsing.shared_options import FORCE, data_option, declared_options, verify_option
from onnxgrad_cli.common.flags import status_text
from onnxgrad_cli.options.data import SampleOptions
from onnxgrad_cli.options.train import Course

TRAINING = ("augment", "balance")
"""The fields of `SampleOptions` that have an effect in training only."""


class Sizes(click.ParamType[tuple[int, ...]]):
    """The click type of a single size, or of a size for each axis."""

    name = "N[,N...]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Return the sizes."""
        if isinstance(value, tuple):
            return value
        try:
            return tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not a size: write 4, or 4,4", param, ctx)


on_samples = together(
    data_option("Samples in any format of `onnxgrad train`, or a single picture, .png or .jpeg."),
    option("--sample", type=click.IntRange(min=0), multiple=True, metavar="N",
           help="Use only sample N, counted from 0; may be repeated.", common=True),
    option("--output", metavar="NAME", help="Model output to explain or attack.  [default: the first float output]",
           common=True),
    declared_options(Course, only=("prefix",)),
    declared_options(SampleOptions, without=TRAINING),
    verify_option("Check the gradients numerically."),
    FORCE,
)  # fmt: skip
"""A decorator that adds options to a command: the samples and their conversion, and the check of the gradients."""


def shown(proof: tuple[str, str]) -> str:
    """Return the verdict of the check of the gradients as a line."""
    return f"gradients {status_text(proof[0])}{f': {proof[1]}' if proof[1] else ''}"
