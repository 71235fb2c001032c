"""Add normalization, augmentation and the user's transform to opened data, as the options request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from onnx import TypeProto

from onnxgrad_cli.common.narration import Tell
from onnxgrad_cli.data.augmentation import Transformed, augmentations
from onnxgrad_cli.data.batch_shard import BatchShard
from onnxgrad_cli.data.dataset import Data
from onnxgrad_cli.data.normalization import Normalization, normalizations
from onnxgrad_cli.data.preprocessing import Preprocessing
from onnxgrad_cli.errors import conflict
from onnxgrad_cli.ir.types import is_float
from onnxgrad_cli.metadata import Roles
from onnxgrad_cli.options.data import SampleOptions


def prepared(
    samples: Data,
    validation: Data | None,
    inputs: Mapping[str, TypeProto],
    roles: Roles,
    options: SampleOptions,
    known: Preprocessing,
    seed: int,
    tell: Tell,
) -> tuple[Data, Data | None]:
    """Return the training and validation data with their preprocessing.

    Both get the same normalization and the user's transform. Only the training data are augmented.

    Args:
        samples, validation: the opened data.
        inputs: the inputs of the training model, including labels and sample weights, with their types.
        roles: the roles of the inputs.
        options: the user's options for samples.
        known: the preprocessing that the model or the run folder stores. If it is `settled`, the normalization is not
            computed again.
        seed: the random seed of augmentation and transform.
        tell: receives log messages.

    Raises:
        UsageError: an option doesn't fit the inputs, or the transform fails.
    """
    labels = {name for name in inputs if roles.inputs.get(name) in ("label", "sample weight")}
    floats = {name: kind for name, kind in _read_floats(inputs, samples).items() if name not in labels}
    normal = normalizations(
        options.normalize, floats, samples.normal, samples.column, "the previous training", known.settled, tell
    )
    samples = prepared_alike(replace(samples, normal={}), normal, inputs, roles, options, seed)
    if validation is not None:
        validation = replace(validation, normal=normal, transform=samples.transform)
    return samples, validation


def prepared_alike(
    samples: Data,
    normal: Mapping[str, Normalization],
    inputs: Mapping[str, TypeProto],
    roles: Roles,
    options: SampleOptions,
    seed: int,
) -> Data:
    """Return training data with a known normalization, such as the normalization of the first of several data sets.

    The arguments that are not described here are those of `prepared`.

    Args:
        samples: the opened data. They keep their own normalization of inputs that are not in `normal`.
        normal: input -> its normalization.

    Raises:
        UsageError: an option doesn't fit the inputs, or the transform fails.
    """
    labels = {name for name in inputs if roles.inputs.get(name) in ("label", "sample weight")}
    fed = {name: kind for name, kind in inputs.items() if name not in labels}
    changed = augmentations(options.augment, fed, {name: inputs[name] for name in labels}, seed)
    function = None if options.transform is None else Transformed(options.transform, seed)
    samples = replace(samples, normal={**samples.normal, **normal}, augment=changed, transform=function)
    if function is not None:
        first = np.arange(min(len(samples), 2 if samples.padding is None else 1))
        samples.batch(first, BatchShard(first, len(first)))  # report errors of the transform before the first step
    return samples


def as_trained(samples: Data, inputs: Mapping[str, TypeProto], options: SampleOptions, tell: Tell) -> Data:
    """Return data for evaluation or prediction, preprocessed like the training data.

    The normalization is the one that the model stores, unless the options request another.

    Args:
        samples: the opened data.
        inputs: the inputs of the model without labels, with their types.
        options: the user's options for samples.
        tell: receives log messages.

    Raises:
        UsageError: an option doesn't fit the inputs, or applies only to training.
    """
    if options.augment or options.balance:
        raise conflict("`augment` and `balance` are only for training", "leave them out")
    if any(text.rpartition(":")[2] == "auto" for text in options.normalize):
        hint = "pass the numbers of the training data: MEAN/STD"
        raise conflict("`normalize='auto'` is only for training data", hint)
    floats = _read_floats(inputs, samples)
    normal = normalizations(options.normalize, floats, samples.normal, samples.column, "training", False, tell)
    function = None if options.transform is None else Transformed(options.transform, 0)
    return replace(samples, normal=normal, transform=function)


def _read_floats(inputs: Mapping[str, TypeProto], samples: Data) -> dict[str, TypeProto]:
    """Return the inputs of floats that are read from the data. Masks, for example, are computed."""
    return {name: kind for name, kind in inputs.items() if is_float(kind) and name in samples.arrays}
