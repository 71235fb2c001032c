"""Check, before the first step, that the names, types, shapes, number of samples and values of data fit a model.

The values are read once, in blocks, so that memory-mapped arrays may be larger than memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from onnx import TensorProto, TypeProto, helper

from onnxgrad_cli.data.class_names import FOR_NUMBERS
from onnxgrad_cli.data.input_types import InputTypes, Range
from onnxgrad_cli.data.lists import Lists
from onnxgrad_cli.data.loaded_columns import Column, LoadedColumns
from onnxgrad_cli.data.pictures import Pictures
from onnxgrad_cli.data.ragged import Ragged
from onnxgrad_cli.errors import mismatch, missing_value, no_data, suggest, wrong_shape, wrong_type, wrong_value
from onnxgrad_cli.ir.types import FLOATS, UNNAMED, Shape, dtype_of, in_words, is_float, shape_of

WHOLE = frozenset({
    TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64, TensorProto.UINT8, TensorProto.UINT16,
    TensorProto.UINT32, TensorProto.UINT64, TensorProto.BOOL,
})  # fmt: skip

BLOCK = 2**24
"""The number of bytes of an array that are checked at once."""

CORRECT = "correct these samples, or leave them out"

FOR_CLASSES = "if they are class numbers, choose the loss that takes them: `losses='cross-entropy'`"
"""The hint about class numbers if nothing is known about the output of the model."""

Arrays = Mapping[str, Column]


Sizes = tuple[int, dict[str, int], int | None]
"""The number of samples; symbolic dimension -> its size, except for the batch; and the batch size if it is fixed."""


def check_inputs(inputs: InputTypes) -> int | None:
    """Check that the first axis of all inputs is the batch, and that their element types can be read from data.

    Returns:
        The fixed batch size of the model; None if the model takes any.

    Raises:
        UsageError: the element type of an input can't be read from data, the first axis of an input is not the batch,
            or inputs have different fixed batch sizes.
    """
    leading: dict[int | str, str] = {}
    for name, value_type in inputs.items():
        if dtype_of(value_type) not in FLOATS | WHOLE:
            kind = in_words(value_type) or "of an unknown type"
            hint = "make it a constant of the model"
            raise wrong_type(f"input '{name}' is {kind}, and data can't have this type", hint)
        for size in (shape_of(value_type) or ())[:1]:
            leading.setdefault(size, name)
    fixed = {size: name for size, name in leading.items() if isinstance(size, int)}
    if len(fixed) > 1:
        said = " and ".join(f"{size} in '{name}'" for size, name in list(fixed.items())[:2])
        hint = "set the same size with `shapes`; save an input that is the same for all samples with its declared shape"
        raise mismatch(f"the first axis of each input must be the same batch size, but it is {said}", hint)
    for name, value_type in inputs.items():
        for dim in (shape_of(value_type) or ())[1:]:
            if dim in leading and isinstance(dim, str) and dim != "?":
                message = f"input '{name}' is {in_words(value_type)}: its batch '{dim}' is not its first axis"
                raise wrong_shape(message, "export the model with the batch as the first axis of this input")
    return next(iter(fixed), None)


def without_samples(arrays: Arrays, inputs: InputTypes) -> frozenset[str]:
    """Return the inputs that are the same for all samples, such as the initial state of a recurrent network.

    The array of such an input matches its declared shape. In this shape, the first size is a number that is not the
    first size of another input, and no size is the batch symbol of another input.
    """
    shapes = {name: shape for name, value_type in inputs.items() if (shape := shape_of(value_type))}

    def is_apart(name: str) -> bool:
        leading = {shape[0] for other, shape in shapes.items() if other != name}
        batches = {dim for dim in leading if isinstance(dim, str) and dim != "?"}
        return bool(leading) and shapes[name][0] not in leading and batches.isdisjoint(shapes[name])

    same = {name for name in shapes if name in arrays and _fits(arrays[name].shape, shapes[name]) and is_apart(name)}
    return frozenset(name for name in same if len(same) < len(shapes) or shapes[name][0] != 1)


def _fits(sizes: Sequence[int], shape: Shape) -> bool:
    """Return True if the sizes of an array match a declared shape whose first size is a number, not a symbol."""
    fixed = isinstance(shape[0], int) and len(sizes) == len(shape)
    return fixed and all(isinstance(dim, str) or size == dim for size, dim in zip(sizes, shape, strict=True))


def check(source: Path, found: LoadedColumns, inputs: InputTypes, ranges: Mapping[str, Range], finite: bool) -> Sizes:
    """Check that data fit the model.

    Args:
        source: the file or folder, for messages.
        found: the data.
        inputs: the inputs and labels, with their types.
        ranges: input or label -> the integers that it accepts.
        finite: raise an error if the data contain NaN or infinity.

    Returns:
        See `Sizes`. The fixed batch size is None if the model takes any.

    Raises:
        UsageError: the data don't fit. The message names the file, the input and the first wrong sample.
    """
    same = without_samples(found.arrays, inputs)
    batch_size = check_inputs({name: value_type for name, value_type in inputs.items() if name not in same})
    _check_names(source, found, inputs)
    sizes: dict[str, tuple[int, str]] = {}
    for name, value_type in inputs.items():
        column = found.arrays[name]
        plain = column.elements if isinstance(column, Ragged) else column
        _check_type(source, name, plain.values if isinstance(plain, Lists) else plain, inputs)
        if isinstance(column, Ragged):
            continue
        if isinstance(column, Lists):
            _check_places(source, name, column, value_type)
        elif name not in same:
            of_classes = ranges[name].hint if name in ranges and is_float(value_type) else ""
            _check_shape(source, name, column, shape_of(value_type), sizes, of_classes)
    _check_ragged(source, found.arrays, inputs, sizes)
    size = _count(source, {name: column for name, column in found.arrays.items() if name not in same}, inputs)
    for name in inputs:
        dtype = helper.tensor_dtype_to_np_dtype(dtype_of(inputs[name]))
        _check_numbers(source, name, found.arrays[name], dtype, ranges.get(name), finite)
        if name in ranges:
            _check_some_count(source, name, found.arrays[name], ranges[name])
    return size, {symbol: size for symbol, (size, _) in sizes.items()}, batch_size


def _check_names(source: Path, found: LoadedColumns, inputs: InputTypes) -> None:
    missing = [name for name in inputs if name not in found.arrays]
    if missing:
        wanted = ", ".join(f"'{name}' ({in_words(inputs[name])})" for name in missing)
        hint = f"the model takes {', '.join(inputs)}"
        if found.others:
            meant = _other_names(missing, found.others)
            hint = f"{meant}{'' if meant.endswith('?') else ';'} {hint}"
        elif not found.arrays and source.is_dir():
            hint += ": save .npy files with these names, or pictures in folders with the names of their classes"
        raise (missing_value if found.arrays or found.others else no_data)(f"'{source}' has no {wanted}", hint)


def _other_names(missing: Sequence[str], others: Sequence[str]) -> str:
    """Return a hint for missing arrays: the prefix, the mapping or the similar names that may be meant."""
    prefixes = [name.removesuffix(missing[0]) for name in others if name.endswith(missing[0])]
    prefixes = [prefix for prefix in prefixes if all(f"{prefix}{name}" in others for name in missing)]
    if prefixes:
        return f"did you mean {' or '.join(f'`prefix={prefix}`' for prefix in prefixes[:3])}?"
    if len(missing) == len(others) == 1:
        return f"did you mean {others[0]}? `columns={others[0]}={missing[0]}` reads it as '{missing[0]}'"
    return suggest(missing[0], others, "names in the data")


def _check_type(source: Path, name: str, array: np.ndarray | Pictures, inputs: InputTypes) -> None:
    """Check that the dtype of an array fits its input.

    Raises:
        UsageError: the dtype does not fit. The hint explains how to save the data with a dtype that fits.
    """
    wanted, floats = inputs[name], array.dtype.kind == "f" or array.dtype.name == "bfloat16"
    if array.dtype.kind in "biu" or (is_float(wanted) and floats):
        return
    held, hint = str(array.dtype), "save numbers"
    if floats:
        hint = "save whole numbers: array.astype(numpy.int64)"
        if dtype_of(wanted) == TensorProto.UINT8 and len(shape_of(wanted) or ()) == 4:
            hint = "save pixels as whole numbers 0 to 255: array.astype(numpy.uint8), times 255 if the largest is 1"
        elif array.ndim == len(shape_of(wanted) or ()) + 1:
            hint = "save class numbers, not a probability for each class: array.argmax(1)"
        elif isinstance(array, np.ndarray) and any((block != np.rint(block)).any() for _, block in blocks(array)):
            hint = "not all are whole numbers: if they are not classes, use a loss that takes any numbers, such as mse"
    elif array.dtype.names:
        held = f"records of {', '.join(array.dtype.names)}"
        hint = "save numbers: numpy.lib.recfunctions.structured_to_unstructured(array), or an array for each field"
    elif isinstance(array, np.ndarray) and array[:1].size and isinstance(array.flat[0], bytes):
        held, hint = "bytes", "save numbers, or lists of numbers"
    elif array.dtype.kind in "OUST":
        held, hint = "text", FOR_NUMBERS if is_float(wanted) and array[:1].size == 1 else hint
    raise wrong_type(f"'{source}': '{name}' holds {held}, but the model takes {in_words(wanted)}", hint)


def _check_shape(
    source: Path, name: str, array: np.ndarray | Pictures, shape: Shape | None, sizes: dict[str, tuple[int, str]],
    of_classes: str,
) -> None:  # fmt: skip
    """Check that an array has the shape of its input, except for the first axis, which runs over the samples.

    Args:
        source: the file or folder, for messages.
        name: the input.
        array: its samples.
        shape: the shape of the input; None if it is unknown.
        sizes: symbolic dimension -> its size, and the input from which the size was taken. The symbols of this input
            are added.
        of_classes: the hint about class numbers; "" for an input that has no such hint.

    Raises:
        UsageError: the shapes don't match, or a symbolic dimension has different sizes in two inputs.
    """
    if shape is None:
        return
    wanted = ", ".join("?" if UNNAMED.fullmatch(str(dim)) else str(dim) for dim in shape)
    message = f"'{source}': '{name}' has shape {list(array.shape)}, but the model takes [{wanted}]"
    if array.ndim != len(shape):
        raise wrong_shape(message, _reshape(array, shape, of_classes))
    for dim, size in zip(shape[1:], array.shape[1:], strict=True):
        bound, by = sizes.setdefault(dim, (size, name)) if isinstance(dim, str) and dim != "?" else (dim, "")
        if bound not in (size, "?"):
            other = f"; '{dim}' is {bound} in '{by}'" if by else ""
            raise wrong_shape(message + other, "the first axis is the batch; the other axes must be as in the model")


def _check_places(source: Path, name: str, lists: Lists, value_type: TypeProto) -> None:
    """Check that an input accepts lists of different lengths. Only integer inputs [samples, positions] do.

    Raises:
        UsageError: the input does not accept them.
    """
    if is_float(value_type) or len(shape_of(value_type) or ()) != 2:
        held = f"lists of {lists.lengths.min()} to {lists.lengths.max()} elements"
        hint = "pad the lists to the same length: only tokens, and whole numbers that belong to tokens, are padded here"
        raise wrong_shape(f"'{source}': '{name}' holds {held}, but the model takes {in_words(value_type)}", hint)


def _check_ragged(source: Path, arrays: Arrays, inputs: InputTypes, sizes: Mapping[str, tuple[int, str]]) -> None:
    """Check that arrays of different shapes fit their inputs, and have the same size along the same symbol.

    Args:
        source: the file or folder, for messages.
        arrays: the columns.
        inputs: the inputs and labels, with their types.
        sizes: symbolic dimension -> its size in all samples of other columns, and the input with this size.

    Raises:
        UsageError: a sample does not fit. The message names the sample.
    """
    own: dict[str, tuple[np.ndarray, str]] = {}
    for name in inputs:
        column, shape = arrays[name], shape_of(inputs[name])
        if not isinstance(column, Ragged) or shape is None:
            continue
        wanted = in_words(inputs[name])
        if column.ndim != len(shape):
            held = f"arrays with {column.ndim - 1} axes" if column.ndim > 2 else "lists"
            message = f"'{source}': '{name}' holds {held} of different sizes, but the model takes {wanted}"
            raise wrong_shape(message, f"save an array with {len(shape) - 1} axes for each sample")
        for axis, dim in enumerate(shape[1:]):
            there, by = column.shapes[:, axis], ""
            bound: np.ndarray | int = dim if isinstance(dim, int) else there
            if isinstance(dim, str) and dim != "?":
                bound, by = sizes[dim] if dim in sizes else own.setdefault(dim, (there, name))
            wrong = (there != bound) if (there != bound).any() else there == 0
            if wrong.any():
                row = int(wrong.argmax())
                other = f", but the model takes {wanted}" if there[row] else ""
                if by not in ("", name):
                    other = f", but '{by}' has {np.broadcast_to(bound, there.shape)[row]}"
                message = f"'{source}': '{name}' has size {there[row]} along axis {axis} in sample {row}"
                hint = "samples may differ only along axes that have a symbol in the model, and must not be empty"
                raise wrong_shape(f"{message} (the first is 0){other}", hint)


def _reshape(array: np.ndarray | Pictures, shape: tuple[int | str, ...], of_classes: str) -> str:
    if not array.ndim and shape:
        return "it is a single number, but each sample needs its own"
    if len(shape) == array.ndim + 1 and shape[-1] in (1, "?"):
        return "save it with one more axis: array[..., None]"
    if array.dtype.kind in "iu" and len(shape) == array.ndim + 1:
        return of_classes or FOR_CLASSES
    if len(shape) == array.ndim - 1 and array.shape[-1] == 1:
        return "save it without its last axis: array[..., 0]"
    return "the first axis is the sample" if shape else "save a single number, the same for all samples"


def _count(source: Path, arrays: Arrays, inputs: InputTypes) -> int:
    """Return the number of samples.

    Raises:
        UsageError: no array has an axis of samples, the numbers of samples differ, or an array is empty.
    """
    counts = {name: len(array) for name, array in arrays.items() if array.ndim}
    if not counts:
        raise no_data(f"'{source}' has no samples", "at least one input must have an axis of samples")
    first, size = next(iter(counts.items()))
    for name, other in counts.items():
        if other != size:
            hint = "the first axis is the sample, and each sample needs all inputs"
            raise wrong_shape(f"'{source}': '{first}' has {size} samples, but '{name}' has {other}", hint)
    for name, array in arrays.items():
        if _is_empty(array, shape_of(inputs[name])):
            raise no_data(f"'{source}' is empty: '{name}' has shape {list(array.shape)}", "add samples")
    return size


def _is_empty(array: Column, shape: Shape | None) -> bool:
    """Return True if an array has no elements and is not the empty KV cache of a decoder."""
    sizes = zip(array.shape, shape or (), strict=False)
    past = any(size == 0 and (dim == 0 or str(dim).startswith("past")) for size, dim in list(sizes)[1:])
    return not array.size and not (past and len(array))


# -- the values ----------------------------------------------------------------------------------------


def _check_numbers(
    source: Path, name: str, array: Column, dtype: np.dtype, allowed: Range | None, finite: bool
) -> None:
    if dtype.kind == "b":
        check_whole(source, name, array, Range(0, 1, why="it is true or false") & (allowed or Range(None, None)))
    elif dtype.kind in "iu":
        info = np.iinfo(dtype)
        check_whole(source, name, array, Range(int(info.min), int(info.max)) & (allowed or Range(None, None)))
    elif finite and not isinstance(array, Lists):
        _check_finite(source, name, array, dtype)


def check_whole(source: Path, name: str, array: Column, allowed: Range) -> None:
    """Check that the integers in the samples of an input are in the allowed range.

    Raises:
        UsageError: an integer is out of range. The message names the first sample with one.
    """
    if array.dtype.kind == "b":
        return
    for start, block in _parts(array):
        bad = np.zeros(block.shape, bool)
        if allowed.low is not None:
            bad |= block < allowed.low
        if allowed.high is not None:
            bad |= block > allowed.high
        if bad.any():
            bad &= ~np.isin(block, list(allowed.besides))
        if bad.any():
            hint = _hint(name, array, int(block[bad][0]), allowed)
            must = f"must be {_words(allowed)}{': ' * bool(allowed.why)}{allowed.why}"
            raise wrong_value(_describe_first(source, name, start, block, bad, must), hint)


def _parts(array: Column) -> Iterator[tuple[int, np.ndarray]]:
    if isinstance(array, Ragged):
        return array.samples()
    return array.blocks(BLOCK // 8) if isinstance(array, Lists) else blocks(array)


def _hint(name: str, array: Column, wrong: int, allowed: Range) -> str:
    """Return the hint about integers outside of a range. Only ranges of class numbers have further integers, `besides`.

    Args:
        name: the input.
        array: its samples.
        wrong: the first wrong integer.
        allowed: the range.
    """
    hint = f"{CORRECT}; {allowed.hint}" if allowed.hint else CORRECT
    if not allowed.besides:
        return hint
    ignored = sorted(allowed.besides)
    counted = (block[~np.isin(block, ignored)] for _, block in _parts(array))
    ends = [(int(block.min()), int(block.max())) for block in counted if block.size]
    high = max(end for _, end in ends)
    if min(start for start, _ in ends) == 1 and allowed.high is not None and high == allowed.high + 1:
        return f"class numbers start at 0, and these are 1 to {high}: subtract 1 from '{name}'"
    if wrong == -1:
        hint = f"if -1 marks samples to ignore, save {ignored[0]} for it or set `loss_options=ignore-index=-1`; {hint}"
    return hint


def _check_some_count(source: Path, name: str, array: Column, allowed: Range) -> None:
    """Check that the loss does not ignore all labels. A mean over no labels would be undefined.

    Raises:
        UsageError: all labels are ignored.
    """
    if allowed.besides and all(np.isin(block, list(allowed.besides)).all() for _, block in _parts(array)):
        said = ", ".join(map(str, sorted(allowed.besides)))
        message = f"'{source}': '{name}' is {said} in all samples, so none of them counts in the loss"
        raise no_data(message, "give labels to some samples")


def _words(allowed: Range) -> str:
    low, high = allowed.low, allowed.high
    words = f"at least {low}" if high is None else f"at most {high}" if low is None else f"{low} to {high}"
    return " or ".join([words, *map(str, sorted(allowed.besides))])


def _check_finite(source: Path, name: str, array: np.ndarray | Ragged | Pictures, dtype: np.dtype) -> None:
    for start, block in _parts(array):
        with np.errstate(over="ignore", invalid="ignore"):
            bad = ~np.isfinite(block if block.dtype == dtype else block.astype(dtype))
        if bad.any():
            raise wrong_value(_describe_first(source, name, start, block, bad, f"must be a finite {dtype}"), CORRECT)


def _describe_first(source: Path, name: str, start: int, block: np.ndarray, bad: np.ndarray, must: str) -> str:
    """Return an error message about the first bad value of a block whose first sample has the index `start`."""
    place = [int(at) for at in np.unravel_index(int(bad.argmax()), bad.shape)]
    value = block[tuple(place)]
    sample = f"sample {start + place[0]} (the first is 0)" if place else "the number for all samples"
    inside = f" at index {place[1:]}" if place[1:] else ""
    return f"'{source}': '{name}' is {value} in {sample}{inside}, but {must}"


def blocks(array: np.ndarray | Pictures) -> Iterator[tuple[int, np.ndarray]]:
    """Yield an array in blocks of whole samples, each with the index of its first sample."""
    if not array.ndim:
        yield 0, np.asarray(array)
        return
    rows = max(BLOCK * len(array) // max(array.nbytes, 1), 1)
    for start in range(0, len(array), rows):
        yield start, np.asarray(array[start : start + rows])
