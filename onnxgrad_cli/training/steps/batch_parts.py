"""Check that the loss of a batch can be computed from parts of the batch, and find the divisors of its means."""

from __future__ import annotations

from onnxgrad_cli.builder import TrainingModel
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.ir.types import shape_of


def divisors_of(built: TrainingModel, part: str, alternative: str) -> list[str]:
    """Return, for each loss, the output with the number by which the loss divides its sum to get the mean.

    The name of the output is "" if this number is proportional to the batch size.

    Args:
        built: the training model.
        part: the word for the owner of a part in messages, such as 'process'.
        alternative: a way to train without parts, as text for hints.

    Raises:
        UsageError: the loss of a batch can't be computed from its parts.
    """
    options, training = built.options, built.training
    first_axes = [shape[0] for value in built.model.graph.input if (shape := shape_of(value.type))]
    for position, (spec, output) in enumerate(zip(options.losses, training.predictions, strict=True)):
        why = ""
        if position in training.scalars:
            why = "is one number for a batch"
        elif position in training.mixing:
            why = f"may depend on the other samples of a batch, or on their number ({training.mixing[position]})"
        if why and any(isinstance(size, str) for size in first_axes):
            raise UsageError(
                f"the loss '{spec.name}' on '{output}' {why}: it can't be computed from parts of the batch",
                f"choose a loss that has a value for each sample, or {alternative}",
            )
    if options.reduction == "sum" and (options.l1 or options.l2):
        hint = f"use `reduction='mean'`, or {alternative}"
        raise UsageError(f"`l1` and `l2` would be added once for each {part}", hint)
    return [training.divisors.get(position, "") for position in range(len(options.losses))]
