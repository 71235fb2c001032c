"""What is done to samples as a whole: a normalization, which follows from the training data, and what is random."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from onnx import TypeProto

from onnxgrad_cli.common.narration import Tell
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.ir.types import is_float
from onnxgrad_cli.metadata import Roles
from onnxgrad_cli.training.data.augmentation import augmentations
from onnxgrad_cli.training.data.dataset import Data
from onnxgrad_cli.training.data.normalization import normalizations, tell_known, warn_of_bytes
from onnxgrad_cli.training.data.part import Part
from onnxgrad_cli.training.data.preprocessing import Preprocessing
from onnxgrad_cli.training.data.sample_options import SampleOptions
from onnxgrad_cli.training.data.transform import Transformed


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
    """The training data and the validation data as they are fed.

    Args:
        samples, validation: the data as they were opened.
        inputs: what the model is fed, with its types.
        roles: which of it are labels and sample weights.
        options: what is asked for.
        known: what holds of a normalization where nothing else is asked for, or a run goes on.
        seed: of what is done at random, which is done to the training data alone.
        tell: takes what is narrated.

    Raises:
        UsageError: something of it can't be done to these inputs.
    """
    labels = {name for name in inputs if roles.inputs.get(name) in ("label", "sample weight")}
    fed = {name: kind for name, kind in inputs.items() if name not in labels}
    floats = {name: kind for name, kind in fed.items() if is_float(kind)}
    asked = () if known.settled else options.normalize
    normal = normalizations(asked, floats, samples, samples.normal, tell)
    warn_of_bytes(options.normalize, floats, samples, normal, tell)
    if not asked:
        tell_known(normal, "the training before", tell)
    changed = augmentations(options.augment, fed, {name: inputs[name] for name in labels}, seed)
    function = None if options.transform is None else Transformed(options.transform, seed)
    samples = replace(samples, normal=normal, augment=changed, transform=function)
    if function is not None:
        first = np.arange(min(len(samples), 2))
        samples.batch(first, Part(first, len(first)))  # what is wrong with it is told before the first step
    return samples, None if validation is None else replace(validation, normal=normal, transform=function)


def as_trained(samples: Data, inputs: Mapping[str, TypeProto], options: SampleOptions, tell: Tell) -> Data:
    """Data that are not trained on as they are fed: normalised as the model says of its training, or as is asked for.

    Args:
        samples: the data as they were opened.
        inputs: what the model is fed besides labels, with its types.
        options: what is asked for.
        tell: takes what is narrated.

    Raises:
        UsageError: something of it can't be done to these inputs, or is of training alone.
    """
    if options.augment or options.balance:
        raise UsageError("`augment` and `balance` are of training", "leave them out")
    if any(text.rpartition(":")[2] == "auto" for text in options.normalize):
        raise UsageError("`normalize='auto'` is of the training data", "give their numbers: MEAN/STD")
    floats = {name: kind for name, kind in inputs.items() if is_float(kind)}
    normal = normalizations(options.normalize, floats, samples, samples.normal, tell)
    warn_of_bytes(options.normalize, floats, samples, normal, tell)
    if not options.normalize:
        tell_known(normal, "the training", tell)
    function = None if options.transform is None else Transformed(options.transform, 0)
    return replace(samples, normal=normal, transform=function)
