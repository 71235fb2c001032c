"""Rows of onnxgrad_cli/autodiff/rules/fft.py."""

import numpy as np

from tests.harness import Case, const


def dft(shape, length=None, axis=1, opset: int = 20, **keywords) -> Case:
    """One transform, with its axis where the opset has it."""
    attrs = keywords.pop("attrs", {})
    inputs = [shape, None if length is None else const(length) if isinstance(length, int) else length]
    if opset < 20:
        attrs = {**attrs, "axis": axis}
    else:
        inputs.append(axis if isinstance(axis, np.ndarray) else const(axis))
    return Case("DFT", inputs, attrs, opset=opset, **keywords)


FORWARD = [{}, {"onesided": 1}, {"inverse": 1}]
LATE = np.array(4)

ROWS = [
    *(
        dft((2, 4, 3, parts), length, axis, attrs=attrs)
        for attrs in FORWARD
        for parts in ((1,) if attrs.get("onesided") else (1, 2))
        for length in (None, 3, 4, 7)
        for axis in (1, -2)
    ),
    *(dft((2, 5, 1), length, opset=opset, attrs=a) for a in FORWARD for length in (None, 4) for opset in (17, 19, 26)),
    *(dft((2, size, 1), attrs={"onesided": 1}, note="odd and even") for size in (1, 2, 5, 8)),
    *(dft((2, size, 2), attrs={"onesided": 1, "inverse": 1}) for size in (2, 3, 4, 5)),
    *(dft((2, 4, 2), length, attrs={"onesided": 1, "inverse": 1}, symbolic=False) for length in (6, 7)),
    dft((2, 4, 3, 2), axis=2, opset=17, attrs={"onesided": 1, "inverse": 1}),
    Case("DFT", [(2, 4, 2)], opset=20, executor="reference", note="default axis, on which onnxruntime crashes"),
    *(dft((2, 5, 1), LATE, attrs=attrs, note="length at run time") for attrs in FORWARD),
    dft((2, 5, 2), LATE, axis=-2, opset=17, note="length at run time"),
    *(
        dft((2, 4, 3, 2 if attrs.get("inverse") else 1), None, np.array(axis), attrs=attrs, note="axis at run time")
        for attrs in (*FORWARD, {"inverse": 1, "onesided": 1})
        for axis in (-2, 1, 0)
    ),
    *(
        Case("STFT", [(2, 16, parts), const(step), window, length], attrs, opset=opset, note=note)
        for attrs, parts in (({"onesided": 1}, 1), ({"onesided": 0}, 1), ({"onesided": 0}, 2))
        for opset, step, window, length, note in (
            (17, 4, (8,), None, "window"),
            (18, 3, (5,), None, "odd window, gaps at the end"),
            (20, 3, None, const(6), "frame length"),
            (20, 6, (4,), const(4), "both, with gaps between"),
            (26, 1, (16,), None, "one frame"),
        )
    ),
    Case(
        "STFT",
        [(2, 12, 1), const(3), None, None],
        {"onesided": 1},
        opset=17,
        executor="reference",
        note="one rectangular frame",
    ),
    Case(
        "STFT",
        [(1, 12, 1), np.array(2), (4,), np.array(4)],
        {"onesided": 1},
        opset=18,
        note="step and length at run time",
    ),
    Case("STFT", [(1, 12, 1), const(2, np.int32), None, const(4, np.int32)], {"onesided": 1}, opset=17, note="int32"),
]
