"""Whether data fit a training model, told before the first step: names, types, shapes, counts, then every number.

The numbers are read once, in blocks, so that arrays which are mapped from files may be larger than memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from onnx import TensorProto, TypeProto, helper

from onnxgrad_cli.errors import UsageError, suggest
from onnxgrad_cli.ir.types import FLOATS, UNNAMED, Shape, dtype_of, in_words, is_float, shape_of
from onnxgrad_cli.training.data.class_names import FOR_NUMBERS
from onnxgrad_cli.training.data.input_types import InputTypes, Range
from onnxgrad_cli.training.data.lists import Lists
from onnxgrad_cli.training.data.pictures import Pictures
from onnxgrad_cli.training.data.reading import Column, Found

WHOLE = frozenset({
    TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64, TensorProto.UINT8, TensorProto.UINT16,
    TensorProto.UINT32, TensorProto.UINT64, TensorProto.BOOL,
})  # fmt: skip

BLOCK = 2**24
"""Bytes of an array that are looked at in one go."""

Arrays = Mapping[str, Column]


@dataclass(frozen=True)
class Checked:
    """What a check has found out: the samples, the sizes of symbols, and the batch that the model is fixed to."""

    size: int
    sizes: dict[str, int]
    batch_size: int | None


def check_inputs(inputs: InputTypes) -> int | None:
    """Make sure that inputs can be fed sample by sample.

    Returns:
        The size of the batch, where the model has it fixed.

    Raises:
        UsageError: an input is of a type that data can't have, or its first axis is not the sample.
    """
    leading: dict[int | str, str] = {}
    for name, value_type in inputs.items():
        if dtype_of(value_type) not in FLOATS | WHOLE:
            kind = in_words(value_type) or "of an unknown type"
            raise UsageError(f"input '{name}' is {kind}, which data can't be read as", "fold it into the model first")
        shape = shape_of(value_type)
        if shape:
            leading.setdefault(shape[0], name)
    fixed = {size: name for size, name in leading.items() if isinstance(size, int)}
    if len(fixed) > 1:
        said = " and ".join(f"{size} in '{name}'" for size, name in list(fixed.items())[:2])
        raise UsageError(
            f"the first axis of an input is its batch, and it is {said}",
            "make it one size with `shapes`, or save the input that is the same for all samples in its own shape",
        )
    for name, value_type in inputs.items():
        shape = shape_of(value_type) or ()
        for axis, dim in enumerate(shape):
            if axis and dim in leading and isinstance(dim, str) and dim != "?":
                raise UsageError(
                    f"input '{name}' is {in_words(value_type)}: its batch '{dim}' is not its first axis",
                    "data are cut into batches along the first axis: export the model so",
                )
    return next(iter(fixed), None)


def without_samples(arrays: Arrays, inputs: InputTypes) -> frozenset[str]:
    """Return the inputs that are the same for all samples, such as the initial state of a recurrent network.

    The array of such an input fits its declared shape, whose first size is a number and not the batch of other inputs.
    """
    shapes = {name: shape for name, value_type in inputs.items() if (shape := shape_of(value_type))}

    def is_apart(name: str) -> bool:
        leading = {shape[0] for other, shape in shapes.items() if other != name}
        batches = {dim for dim in leading if isinstance(dim, str) and dim != "?"}
        return bool(leading) and shapes[name][0] not in leading and batches.isdisjoint(shapes[name])

    same = {name for name in shapes if name in arrays and _fits(arrays[name].shape, shapes[name]) and is_apart(name)}
    return frozenset(name for name in same if len(same) < len(shapes) or shapes[name][0] != 1)


def _fits(sizes: Sequence[int], shape: Shape) -> bool:
    """Return True if an array has a declared shape, whose first size is a number."""
    fixed = isinstance(shape[0], int) and len(sizes) == len(shape)
    return fixed and all(isinstance(dim, str) or size == dim for size, dim in zip(sizes, shape, strict=True))


def check(source: Path, found: Found, inputs: InputTypes, ranges: Mapping[str, Range], finite: bool) -> Checked:
    """Make sure that data can be fed.

    Args:
        source: the file or folder, for messages.
        found: what was read.
        inputs, ranges: what is fed, and the whole numbers it may hold.
        finite: whether nan and infinity are refused.

    Raises:
        UsageError: they can't; the message names the file, the input and the first sample at fault.
    """
    same = without_samples(found.arrays, inputs)
    batch_size = check_inputs({name: value_type for name, value_type in inputs.items() if name not in same})
    _check_names(source, found, inputs)
    sizes: dict[str, tuple[int, str]] = {}
    for name, value_type in inputs.items():
        column = found.arrays[name]
        _check_type(source, name, column.values if isinstance(column, Lists) else column, inputs)
        if isinstance(column, Lists):
            _check_places(source, name, column, value_type)
        elif name not in same:
            _check_shape(source, name, column, shape_of(value_type), sizes)
    size = _count(source, {name: column for name, column in found.arrays.items() if name not in same}, inputs)
    for name in inputs:
        dtype = helper.tensor_dtype_to_np_dtype(dtype_of(inputs[name]))
        _check_numbers(source, name, found.arrays[name], dtype, ranges.get(name), finite)
        if name in ranges:
            _check_some_count(source, name, found.arrays[name], ranges[name])
    return Checked(size, {symbol: size for symbol, (size, _) in sizes.items()}, batch_size)


def _check_names(source: Path, found: Found, inputs: InputTypes) -> None:
    missing = [name for name in inputs if name not in found.arrays]
    if missing:
        wanted = ", ".join(f"'{name}' ({in_words(inputs[name])})" for name in missing)
        hint = suggest(missing[0], found.others, "names there") if found.others else "nothing else is there"
        fed = f"the model is fed {', '.join(inputs)}"
        if not found.arrays and not found.others:
            forms = ": .npy files that are called so, or pictures in folders that are called as their classes"
            hint, fed = "no data are there", fed + (forms if source.is_dir() else "")
        raise UsageError(f"'{source}' has no {wanted}", f"{hint} {fed}" if hint.endswith("?") else f"{hint}; {fed}")


def _check_type(source: Path, name: str, array: np.ndarray | Pictures, inputs: InputTypes) -> None:
    """Make sure that an array holds numbers that its input takes; the hint of the UsageError says how to save such."""
    whole, wanted = array.dtype.kind in "biu", inputs[name]
    if whole or (is_float(wanted) and _is_float(array.dtype)):
        return
    held, hint = str(array.dtype), "save numbers"
    if _is_float(array.dtype):
        hint = "save whole numbers: array.astype(numpy.int64)"
        if array.ndim == len(shape_of(wanted) or ()) + 1:
            hint = "save the number of the class, not a share for each: array.argmax(1)"
        elif isinstance(array, np.ndarray) and any((block != np.rint(block)).any() for _, block in blocks(array)):
            hint = "they are not all whole: if they are no classes, choose a loss that takes any numbers, such as mse"
    elif array.dtype.names:
        held = f"records of {', '.join(array.dtype.names)}"
        hint = "save numbers: numpy.lib.recfunctions.structured_to_unstructured(array), or an array for each field"
    elif isinstance(array, np.ndarray) and array[:1].size and isinstance(array.flat[0], bytes):
        held, hint = "bytes", "save the numbers that they are, or lists of them"
    elif array.dtype.kind in "OUST":
        held, hint = "text", FOR_NUMBERS if is_float(wanted) and array[:1].size == 1 else hint
    raise UsageError(f"'{source}': '{name}' holds {held}, the model takes {in_words(wanted)}", hint)


def _is_float(dtype: np.dtype) -> bool:
    return dtype.kind == "f" or dtype.name == "bfloat16"


def _check_shape(
    source: Path, name: str, array: np.ndarray | Pictures, shape: Shape | None, sizes: dict[str, tuple[int, str]]
) -> None:
    """Make sure that an array has the shape of its input, but for the first axis, which is the sample.

    `sizes` holds the size that each symbol was first met with, and the input where; new symbols are added.
    """
    if shape is None:
        return
    found, wanted = list(array.shape), ", ".join("?" if UNNAMED.fullmatch(str(dim)) else str(dim) for dim in shape)
    if len(found) != len(shape):
        raise UsageError(f"'{source}': '{name}' has shape {found}, the model takes [{wanted}]", _reshape(array, shape))
    for axis, (dim, size) in enumerate(zip(shape, found, strict=True)):
        if axis == 0 or dim == "?":
            continue
        bound, by = sizes.setdefault(dim, (size, name)) if isinstance(dim, str) else (dim, "")
        if bound != size:
            other = f"; '{dim}' is {bound} in '{by}'" if by else ""
            raise UsageError(
                f"'{source}': '{name}' has shape {found}, the model takes [{wanted}]{other}",
                "the first axis is the sample; the others must be the model's",
            )


def _check_places(source: Path, name: str, lists: Lists, value_type: TypeProto) -> None:
    """Make sure that an input takes lists of different lengths: whole numbers, one a place."""
    if is_float(value_type) or len(shape_of(value_type) or ()) != 2:
        raise UsageError(
            f"'{source}': '{name}' holds lists of {lists.lengths.min()} to {lists.lengths.max()} elements, the model "
            f"takes {in_words(value_type)}",
            "pad them to one length: only tokens, and whole numbers beside them, are padded here",
        )


def _reshape(array: np.ndarray | Pictures, shape: tuple[int | str, ...]) -> str:
    if not array.ndim and shape:
        return "it is a single number, and every sample needs its own"
    if len(shape) == array.ndim + 1 and shape[-1] in (1, "?"):
        return "save it with one more axis: array[..., None]"
    if array.dtype.kind in "iu" and len(shape) == array.ndim + 1:
        return "if they are the numbers of classes, choose the loss that takes them: `losses='cross-entropy'`"
    if len(shape) == array.ndim - 1 and array.shape[-1] == 1:
        return "save it without its last axis: array[..., 0]"
    return "the first axis is the sample" if shape else "it is one number, the same for all samples"


def _count(source: Path, arrays: Arrays, inputs: InputTypes) -> int:
    """The number of samples, which is the same for all arrays that have an axis of samples, and is not 0."""
    counts = {name: len(array) for name, array in arrays.items() if array.ndim}
    if not counts:
        raise UsageError(f"'{source}' has no samples", "one input at least must have an axis of samples")
    first, size = next(iter(counts.items()))
    for name, other in counts.items():
        if other != size:
            raise UsageError(
                f"'{source}': '{first}' has {size} samples, '{name}' has {other}",
                "the first axis is the sample, and every sample needs all inputs",
            )
    empty = next((name for name, array in arrays.items() if _is_empty(array, shape_of(inputs[name]))), None)
    if empty:
        raise UsageError(f"'{source}' is empty: '{empty}' has shape {list(arrays[empty].shape)}", "give it samples")
    return size


def _is_empty(array: Column, shape: Shape | None) -> bool:
    """Whether an array has no numbers though it should have some: only the past of a decoder need not."""
    sizes = zip(array.shape, shape or (), strict=False)
    past = any(size == 0 and (dim == 0 or str(dim).startswith("past")) for size, dim in list(sizes)[1:])
    return not array.size and not (past and len(array))


# -- the numbers ---------------------------------------------------------------------------------------


def _check_numbers(
    source: Path, name: str, array: Column, dtype: np.dtype, allowed: Range | None, finite: bool
) -> None:
    if dtype.kind in "biu":
        bounds = _bounds(dtype)
        check_whole(source, name, array, bounds & allowed if allowed else bounds)
    elif finite and not isinstance(array, Lists):
        _check_finite(source, name, array, dtype)


def _bounds(dtype: np.dtype) -> Range:
    if dtype.kind == "b":
        return Range(0, 1, why="it is true or false")
    info = np.iinfo(dtype)
    return Range(int(info.min), int(info.max))


def check_whole(source: Path, name: str, array: Column, allowed: Range) -> None:
    """Make sure that an input holds the whole numbers that it may.

    Raises:
        UsageError: it holds another; the message names the first sample at fault.
    """
    if array.dtype.kind == "b":
        return
    for start, block in array.blocks(BLOCK // 8) if isinstance(array, Lists) else blocks(array):
        bad = np.zeros(block.shape, bool)
        if allowed.low is not None:
            bad |= block < allowed.low
        if allowed.high is not None:
            bad |= block > allowed.high
        if bad.any() and allowed.besides:
            bad &= ~np.isin(block, list(allowed.besides))
        if bad.any():
            raise _at_fault(source, name, start, block, bad, f"must be {_words(allowed)}", allowed)


def _check_some_count(source: Path, name: str, array: Column, allowed: Range) -> None:
    """Make sure that labels are not all the one that says that a sample does not count: no loss is a mean of none."""
    parts = array.blocks(BLOCK // 8) if isinstance(array, Lists) else blocks(array)
    if allowed.besides and all(np.isin(block, list(allowed.besides)).all() for _, block in parts):
        said = ", ".join(map(str, sorted(allowed.besides)))
        raise UsageError(
            f"'{source}': '{name}' is {said} in all samples, which says that they do not count",
            "give labels to some",
        )


def _words(allowed: Range) -> str:
    low, high = allowed.low, allowed.high
    words = f"at least {low}" if high is None else f"at most {high}" if low is None else f"{low} to {high}"
    return " or ".join([words, *map(str, sorted(allowed.besides))])


def _check_finite(source: Path, name: str, array: np.ndarray | Pictures, dtype: np.dtype) -> None:
    for start, block in blocks(array):
        with np.errstate(over="ignore", invalid="ignore"):
            bad = ~np.isfinite(block if block.dtype == dtype else block.astype(dtype))
        if bad.any():
            raise _at_fault(source, name, start, block, bad, f"must be a finite {dtype}")


def _at_fault(
    source: Path, name: str, start: int, block: np.ndarray, bad: np.ndarray, must: str, allowed: Range | None = None
) -> UsageError:
    place = [int(at) for at in np.unravel_index(int(bad.argmax()), bad.shape)]
    value = block[tuple(place)]
    sample = f"sample {start + place[0]} (the first is 0)" if place else "the number for all samples"
    inside = f", at {place[1:]} of it" if place[1:] else ""
    why, hint = (allowed.why, allowed.hint) if allowed else ("", "")
    return UsageError(
        f"'{source}': '{name}' is {value} in {sample}{inside}; it {must}{f': {why}' if why else ''}",
        f"correct these samples, or leave them out{f'; {hint}' if hint else ''}",
    )


def blocks(array: np.ndarray | Pictures) -> Iterator[tuple[int, np.ndarray]]:
    """The array in blocks of whole samples, with the number of the first of each."""
    if not array.ndim:
        yield 0, np.asarray(array)
        return
    rows = max(BLOCK * len(array) // max(array.nbytes, 1), 1)
    for start in range(0, len(array), rows):
        yield start, np.asarray(array[start : start + rows])
