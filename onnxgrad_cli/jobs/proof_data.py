"""Read the user's data on which gradients are checked."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, TypeProto

from onnxgrad_cli.common.narration import Tell
from onnxgrad_cli.errors import (
    OnnxgradError,
    UsageError,
    conflict,
    missing_file,
    suggest,
    unknown_name,
    wrong_shape,
    wrong_type,
)
from onnxgrad_cli.ir.types import Arrays, dtype_of, shape_of
from onnxgrad_cli.metadata import Roles, Term

SAMPLES = 4
"""Number of samples of training data on which gradients are checked. More samples would take more time."""


@dataclass(frozen=True)
class ProofData:
    """The user's data on which gradients are checked: all arrays of an .npz, or the first samples of other data.

    Attributes:
        source: the file or folder; None if no data are given.
        whole: name -> array, for the arrays of an .npz; empty for other data.
        tokenizer: the tokenizer for text in the data; None if the data hold tokens.
    """

    source: Path | None = None
    whole: Mapping[str, np.ndarray] = field(default_factory=dict)
    tokenizer: Path | None = None

    @classmethod
    def of(cls, path: Path | None, tokenizer: Path | None = None) -> ProofData:
        """Return the data at a path. An .npz is read at once; other data are read when the model is known.

        Raises:
            UsageError: a tokenizer is given without data.
            OnnxgradError: the data can't be read.
        """
        if path is None:
            if tokenizer is not None:
                raise conflict("`tokenizer` converts text in data, but no data are given", "leave it out, or give data")
            return cls()
        if not path.exists():
            raise missing_file(f"no such file or folder: '{path}'")
        from onnxgrad_cli.data import array_files, holds_samples  # imported here because most builds have no data

        if holds_samples(path) or tokenizer is not None:
            return cls(path, tokenizer=tokenizer)
        try:
            return cls(path, array_files.arrays_of(path)[0])
        except UsageError as error:
            raise OnnxgradError(error.message, error.hint, error.details, code="unreadable_file") from None

    def arrays(self, model: ModelProto, inputs: Mapping[str, TypeProto], terms: Sequence[Term], tell: Tell) -> Arrays:
        """Return name -> array: the arrays of an .npz file, or the first samples, converted to the model's inputs.

        Args:
            model: the model. If it stores a preprocessing, the samples get the same one.
            inputs: the model's inputs for which samples may have values, with their types.
            terms: the model's losses, which define the labels.
            tell: receives progress messages.

        Raises:
            UsageError: samples can't be read, or don't fit the model.
        """
        if self.source is None or self.whole:
            return dict(self.whole)
        from onnxgrad_cli.data import Preprocessing, SequenceOptions, absent, open_data, rows_of
        from onnxgrad_cli.data.sequences import following, tokens_of

        gone, rows = absent(self.source, inputs), rows_of(model, inputs)
        tokens = tokens_of(inputs, rows, terms)
        if tokens is not None and (self.tokenizer is not None or tokens not in gone):
            gone -= {tokens, *following(inputs, tokens, terms)}
        held = {name: kind for name, kind in inputs.items() if name not in gone or len(gone) == len(inputs)}
        judged = [term for term in terms if term.label in held]
        data = open_data(
            self.source, held, rows, terms=judged, options=SequenceOptions(self.tokenizer),
            known=Preprocessing.of_model(model), tell=tell,
        )  # fmt: skip
        count = data.batch_size or min(len(data), SAMPLES)
        if count < len(data):
            tell(f"'{self.source}': the first {count} of {len(data):,} samples are used", 0)
        return data.batch(np.arange(count))


def fit(
    data: ProofData, model: ModelProto, roles: Roles, tell: Tell, added: Collection[str] = ()
) -> tuple[Arrays, dict[str, int]]:
    """Return the user's arrays for the inputs of a model, and the sizes that the arrays give to symbolic dimensions.

    Args:
        data: the user's data.
        model: a training model or a model of derivatives.
        roles: the roles of the model's inputs.
        tell: receives progress messages.
        added: inputs that were added by the derivatives, so that samples have no values for them.

    Returns:
        Input -> array in the input's type; and symbol -> size.

    Raises:
        UsageError: no array has the name of an input, the shape or type of an array does not fit, or an array contains
            a class number or table index out of range.
    """
    if data.source is None:
        return {}, {}
    from onnxgrad_cli.data import ranges_of
    from onnxgrad_cli.data.validate import check_whole

    types = {value.name: value.type for value in model.graph.input}
    given = data.arrays(model, {n: types[n] for n in roles.sampled if n not in added}, roles.losses, tell)
    ranges = ranges_of(model) if roles.losses else {}
    sizes: dict[str, int] = {}
    fitting = {name: _fitted(name, given[name], types[name], sizes) for name in given if name in types}
    for name in filter(ranges.__contains__, fitting):
        check_whole(data.source, name, given[name], ranges[name])
    unknown = [name for name in given if name not in fitting]
    if not fitting:
        raise unknown_name(
            f"no input of the model is called {' or '.join(repr(name) for name in unknown[:5])}",
            suggest(unknown[0], roles.inputs, "inputs"),
        )
    _tell_names("arrays that are not inputs are ignored", unknown, tell)
    _tell_names(
        "inputs that are not in the data are drawn at random", [name for name in roles.fed if name not in fitting], tell
    )
    return fitting, sizes


def _tell_names(what: str, names: Sequence[str], tell: Tell) -> None:
    if names:
        tell(f"{what}: {', '.join(names)}", 0)


def _fitted(name: str, array: np.ndarray, value_type: TypeProto, sizes: dict[str, int]) -> np.ndarray:
    """Convert an array to the type of its input. Add to `sizes` the sizes that it gives to symbolic dimensions.

    Raises:
        UsageError: the shape or type does not fit the input.
    """
    dtype = onnx.helper.tensor_dtype_to_np_dtype(dtype_of(value_type))
    shape = shape_of(value_type) or array.shape
    dims = zip(shape, array.shape, strict=False)
    bound = [n if d == "?" else sizes.setdefault(d, n) if isinstance(d, str) else d for d, n in dims]
    if len(shape) != array.ndim or tuple(bound) != array.shape:
        raise wrong_shape(f"'{name}' has shape {list(array.shape)} in the data, but {list(shape)} in the model")
    if not np.can_cast(array.dtype, dtype, "same_kind"):
        raise wrong_type(f"'{name}' is of type {array.dtype} in the data, but {dtype} in the model")
    return np.ascontiguousarray(array, dtype).reshape(array.shape)
