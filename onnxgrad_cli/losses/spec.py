"""A loss as it is asked for: in Python, and as it is typed on the command line."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from onnxgrad_cli.common import checks
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.losses.registry import LOSSES


@dataclass(frozen=True)
class LossSpec:
    """One loss as asked for: its name or file, the output it judges, the label input, its share of the total.

    Raises:
        UsageError: there is no loss of this name (a file's ends in .onnx), or the weight is no finite number.
    """

    name: str
    output: str | None = None
    label: str | None = None
    weight: float = 1.0

    def __post_init__(self) -> None:
        checks.text("name", self.name)
        if not self.name.endswith(".onnx"):
            LOSSES.lookup(self.name)
        checks.text("output", self.output, optional=True)
        checks.text("label", self.label, optional=True)
        if not checks.is_number(self.weight):
            raise UsageError(f"`losses`: the weight {self.weight!r} of '{self.name}' is no finite number")


def parse_loss(text: str) -> LossSpec:
    r"""Read `NAME[:OUTPUT[:LABEL[:WEIGHT]]]`; NAME may be a file that ends in .onnx, and `\:` is a plain colon.

    Raises:
        UsageError: no such loss, too many parts, or a weight that is no finite number.
    """
    file = re.match(r".*?\.onnx(?=:|$)", text)
    name, rest = (file[0], text[file.end() + 1 :]) if file else (text.partition(":")[0], text.partition(":")[2])
    parts = [part.replace("\\:", ":") or None for part in re.split(r"(?<!\\):", rest)]
    if len(parts) > 3:
        raise UsageError(
            f"`losses` '{text}' has too many parts", "NAME[:OUTPUT[:LABEL[:WEIGHT]]]; write \\: for a colon"
        )
    if not file:
        LOSSES.lookup(name)
    output, label, weight = [*parts, None, None][:3]
    try:
        share = float(weight or 1.0)
    except ValueError:
        share = math.nan
    if not math.isfinite(share):
        raise UsageError(f"`losses` '{text}': the weight '{weight}' is no number", "NAME[:OUTPUT[:LABEL[:WEIGHT]]]")
    return LossSpec(name, output, label, share)
