"""Options of commands that run a model on samples: the data, and the conversion of data to inputs."""

from __future__ import annotations

from typing import Any

import click

from onnxgrad_cli.cli.parsing.option import TEXT, option, together
from onnxgrad_cli.cli.parsing.options import complete_files, declared_options
from onnxgrad_cli.common.wording import status_text
from onnxgrad_cli.options.data import SampleOptions

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
    option("--data", required=True, type=TEXT, shell_complete=complete_files, metavar="DATA",
           help="Samples in any format of `onnxgrad train`, or a single picture, .png or .jpeg.", common=True),
    option("--sample", type=click.IntRange(min=0), multiple=True, metavar="N",
           help="Use only sample N, counted from 0; may be repeated.", common=True),
    option("--output", metavar="NAME", help="Model output to explain or attack.  [default: the first float output]",
           common=True),
    option("--prefix", default="", metavar="TEXT",
           help="Prefix of the names in --data: with test_, input x is read from test_x."),
    declared_options(SampleOptions, without=TRAINING),
    option("--verify/--no-verify", default=None, help="Check the gradients numerically.  [default: on, unless the "
           "model is large]", common=True),
    option("--force", is_flag=True, help="Replace files that onnxgrad did not write.", common=True),
)  # fmt: skip
"""A decorator that adds options to a command: the samples and their conversion, and the check of the gradients."""


def shown(proof: tuple[str, str]) -> str:
    """Return the verdict of the check of the gradients as a line."""
    return f"gradients {status_text(proof[0])}{f': {proof[1]}' if proof[1] else ''}"
