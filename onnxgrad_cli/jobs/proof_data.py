"""The arrays of a user that a proof is made on."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, TypeProto

from onnxgrad_cli.common.narration import Tell
from onnxgrad_cli.errors import OnnxgradError, UsageError, suggest
from onnxgrad_cli.ir.types import Arrays, dtype_of, shape_of
from onnxgrad_cli.metadata import Roles, Term

SAMPLES = 4
"""Of data that hold samples to train on, how many a proof is made on: its runs take longer with each."""


@dataclass(frozen=True)
class ProofData:
    """Arrays of a user: of an .npz all as they are, of other data to train on the first samples.

    Attributes:
        source: the file or folder; None where nothing is given.
        whole: the arrays of an .npz.
        tokenizer: what makes tokens of text in samples; None where they hold tokens.
    """

    source: Path | None = None
    whole: Mapping[str, np.ndarray] = field(default_factory=dict)
    tokenizer: Path | None = None

    @classmethod
    def of(cls, path: Path | None, tokenizer: Path | None = None) -> ProofData:
        """What a user names, as far as it can be read before the model is known.

        Raises:
            UsageError: there is a tokenizer, and nothing that it is for.
            OnnxgradError: it can't be read.
        """
        if path is None:
            if tokenizer is not None:
                raise UsageError("`tokenizer` is for text in data, and none are named", "leave it out, or name some")
            return cls()
        if not path.exists():
            raise OnnxgradError(f"no such file or folder: '{path}'")
        from onnxgrad_cli.training.data import (
            holds_samples,
            npz,
        )  # most builds have no data, and need not wait for this

        if holds_samples(path) or tokenizer is not None:
            return cls(path, tokenizer=tokenizer)
        try:
            return cls(path, npz.arrays_of(path)[0])
        except UsageError as error:
            raise OnnxgradError(error.message, error.hint, error.details) from None

    def arrays(self, model: ModelProto, inputs: Mapping[str, TypeProto], terms: Sequence[Term], tell: Tell) -> Arrays:
        """The arrays, by the names that they have in the data, or as samples are fed to a model.

        Args:
            model: which says how the data that it was trained on were prepared.
            inputs: what of it samples may hold, with its types.
            terms: its losses, which say what labels are.
            tell: takes what is narrated.

        Raises:
            UsageError: samples can't be read, or don't fit.
        """
        if self.source is None or self.whole:
            return dict(self.whole)
        from onnxgrad_cli.training.data import Preprocessing, SequenceOptions, absent, open_data, rows_of
        from onnxgrad_cli.training.data.sequences import following, tokens_of

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
            tell(f"'{self.source}': the first {count} of {len(data):,} samples are taken", 0)
        return data.batch(np.arange(count))


def fit(
    data: ProofData, model: ModelProto, roles: Roles, tell: Tell, added: Collection[str] = ()
) -> tuple[Arrays, dict[str, int]]:
    """The arrays that are inputs of a training model or a model of derivatives, in its types, and the sizes they give
    to its symbols.

    Args:
        data: what a user has given.
        model: the model.
        roles: of its inputs.
        tell: takes what is narrated.
        added: inputs that no sample holds.

    Raises:
        UsageError: none is an input, or one is of another shape or type, or holds a class or row that there is not.
    """
    if data.source is None:
        return {}, {}
    from onnxgrad_cli.training.data import ranges_of
    from onnxgrad_cli.training.data.validate import check_whole

    types = {value.name: value.type for value in model.graph.input}
    given = data.arrays(model, {n: types[n] for n in roles.sampled if n not in added}, roles.losses, tell)
    ranges = ranges_of(model) if roles.losses else {}
    sizes: dict[str, int] = {}
    fitting = {name: _fitted(name, given[name], types[name], sizes) for name in given if name in types}
    for name in filter(ranges.__contains__, fitting):
        check_whole(data.source, name, given[name], ranges[name])
    unknown = [name for name in given if name not in fitting]
    if not fitting:
        raise UsageError(
            f"no input of the model is called {' or '.join(repr(name) for name in unknown[:5])}",
            suggest(unknown[0], roles.inputs, "inputs"),
        )
    _tell_apart(unknown, [name for name in roles.fed if name not in fitting], tell)
    return fitting, sizes


def _tell_apart(unknown: Sequence[str], drawn: Sequence[str], tell: Tell) -> None:
    """Say which arrays are no inputs, and which inputs have none."""
    for names, what in ((unknown, "not an input, left out"), (drawn, "not in the data, drawn at random")):
        if names:
            tell(f"{what}: {', '.join(names)}", 0)


def _fitted(name: str, array: np.ndarray, value_type: TypeProto, sizes: dict[str, int]) -> np.ndarray:
    """An array in the type of the input it is for; the sizes that it gives to symbols are added to `sizes`.

    Raises:
        UsageError: its shape or type is another.
    """
    dtype = onnx.helper.tensor_dtype_to_np_dtype(dtype_of(value_type))
    shape = shape_of(value_type) or array.shape
    dims = zip(shape, array.shape, strict=False)
    bound = [n if d == "?" else sizes.setdefault(d, n) if isinstance(d, str) else d for d, n in dims]
    if len(shape) != array.ndim or tuple(bound) != array.shape:
        raise UsageError(f"'{name}' has shape {list(array.shape)} in the data, and {list(shape)} in the model")
    if not np.can_cast(array.dtype, dtype, "same_kind"):
        raise UsageError(f"'{name}' is of type {array.dtype} in the data, and {dtype} in the model")
    return np.ascontiguousarray(array, dtype).reshape(array.shape)
