"""Rows of autodiff/rules/recurrent.py, in float64 on onnx.reference: onnxruntime has these layers in float32 only.

tests/autodiff/rules/test_recurrent.py holds that executor against onnxruntime, and the gradients against PyTorch.
"""

import itertools

import numpy as np

from tests.harness import Case, const

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
FUNCTIONS = {"LSTM": 3, "GRU": 2, "RNN": 1}
STEPS, B, SIZE, H = 3, 3, 2, 2
LENGTHS = const([2, 3, 0], np.int32)
DIRECTIONS = ("forward", "reverse", "bidirectional")
ACTIVATIONS = (
    "Affine", "Relu", "LeakyRelu", "ThresholdedRelu", "Tanh", "ScaledTanh", "Sigmoid", "HardSigmoid", "Elu",
    "Softsign", "Softplus",
)  # fmt: skip


def row(op: str, direction="forward", extra=(), opset=18, note="", sizes=(STEPS, B, SIZE, H), **attrs) -> Case:
    """A layer; `extra` names the optional inputs it has."""
    d, n, (steps, batch, size, h) = 2 if direction == "bidirectional" else 1, GATES[op], sizes
    shapes = {
        "b": (d, 2 * n * h), "lens": LENGTHS, "h": (d, batch, h), "c": (d, batch, h), "p": (d, 3 * h),
    }  # fmt: skip
    optional = [shapes[name] if name in extra else None for name in ("b", "lens", "h", *(("c", "p") if n == 4 else ()))]
    while optional and optional[-1] is None:
        optional.pop()
    inputs = [(steps, batch, size), (d, n * h, size), (d, n * h, h), *optional]
    return Case(
        op, inputs, {"hidden_size": h, "direction": direction, **attrs}, outputs=3 if n == 4 else 2, opset=opset,
        low=-1.0, high=1.0, note=" ".join([*extra, note]), executor="reference",
    )  # fmt: skip


def with_activations(op: str, first: int, direction: str, **attrs) -> Case:
    """A layer whose activations are those of the list from `first` on, in turn, each with parameters of its own."""
    count = FUNCTIONS[op] * (2 if direction == "bidirectional" else 1)
    names = [ACTIVATIONS[(first + k) % len(ACTIVATIONS)] for k in range(count)]
    values = {"activation_alpha": [0.3, 0.6, 0.2, 0.5, 0.4, 0.7], "activation_beta": [0.5, 0.8, 0.4, 0.6, 0.7, 0.3]}
    return row(op, direction, ("b", "h"), activations=names, **values, **attrs)


LSTM_INPUTS = (
    (), ("b",), ("b", "h"), ("b", "lens"), ("c",), ("b", "h", "c"), ("b", "lens", "h", "c"), ("b", "p"),
    ("b", "h", "c", "p"), ("b", "lens", "h", "c", "p"),
)  # fmt: skip
INPUTS = ((), ("b",), ("h",), ("b", "lens"), ("b", "lens", "h"))
EVERY = {"LSTM": ("b", "lens", "h", "c", "p"), "GRU": ("b", "lens", "h"), "RNN": ("b", "lens", "h")}

ROWS = [
    *(row("LSTM", d, extra) for d in DIRECTIONS for extra in LSTM_INPUTS),
    *(row("LSTM", d, extra, input_forget=1)
      for d, extra in zip(DIRECTIONS, (("b",), ("h", "c", "p"), EVERY["LSTM"]), strict=True)),
    *(row("LSTM", d, extra, sizes=(2, 25, 1, 50), note="gates kept")
      for d, extra in zip(DIRECTIONS, ((), ("b", "h"), ("b", "h", "c")), strict=True)),
    *(row("GRU", d, extra, linear_before_reset=lbr)
      for d, lbr in itertools.product(DIRECTIONS, (0, 1)) for extra in INPUTS),
    *(row("RNN", d, extra) for d in DIRECTIONS for extra in INPUTS),
    *(with_activations("LSTM", first, "forward") for first in range(len(ACTIVATIONS))),
    *(with_activations("GRU", first, "reverse", linear_before_reset=first % 2) for first in range(len(ACTIVATIONS))),
    *(with_activations("RNN", first, "bidirectional") for first in range(len(ACTIVATIONS))),
    with_activations("LSTM", 0, "bidirectional"),
    with_activations("GRU", 5, "bidirectional", clip=0.9),
    row("LSTM", extra=("b",), activations=["HardSigmoid", "LeakyRelu", "Elu"], note="default parameters"),
    row("RNN", "bidirectional", activations=["Elu", "HardSigmoid"], note="default parameters"),
    row("RNN", activations=["LeakyRelu"], note="default parameters"),
    row("GRU", activations=["sigmoid", "TANH"], note="names in any case"),
    *(row(op, d, extra, clip=0.4)
      for op in GATES for d, extra in zip(DIRECTIONS, (("b",), ("h", "c"), EVERY[op]), strict=True)),
    row("GRU", "bidirectional", ("b", "h"), clip=0.4, linear_before_reset=1),
    row("LSTM", "bidirectional", EVERY["LSTM"], clip=0.4, input_forget=1),
    *(row(op, "bidirectional", EVERY[op], opset=o) for op in GATES for o in (13, 14, 22)),
]  # fmt: skip
