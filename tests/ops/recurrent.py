"""Rows of onnxgrad_cli/rules/recurrent.py, in float32, since no executor has these layers in float64.

tests/test_recurrent.py compares the same rows to six digits with PyTorch. No second order: Scan, which the rules
emit, has no rule.
"""

import itertools

import numpy as np

from tests.harness import Case, const

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
STEPS, B, SIZE, H = 4, 3, 2, 3
LENGTHS = const([2, 4, 3], np.int32)


def row(op: str, direction="forward", extra=(), opset=18, attrs=None, note="", **keywords) -> Case:
    """A layer; `extra` names the optional inputs it has."""
    d, n = 2 if direction == "bidirectional" else 1, GATES[op]
    shapes = {
        "b": (d, 2 * n * H), "lens": LENGTHS, "h": (d, B, H), "c": (d, B, H), "p": (d, 3 * H),
    }  # fmt: skip
    optional = [shapes[name] if name in extra else None for name in ("b", "lens", "h", *(("c", "p") if n == 4 else ()))]
    while optional and optional[-1] is None:
        optional.pop()
    attrs = {"hidden_size": H, "direction": direction, **(attrs or {})}
    note = " ".join([*extra, note])
    keywords = {"step": 3e-3, "tolerance": 1e-2, "floor": 0.03, **keywords}
    shaped = [(STEPS, B, SIZE), (d, n * H, SIZE), (d, n * H, H), *optional]
    rng = np.random.default_rng(3)
    inputs = [rng.uniform(-1, 1, x).astype(np.float32) if isinstance(x, tuple) else x for x in shaped]
    return Case(op, inputs, attrs, outputs=3 if n == 4 else 2, opset=opset, note=note, second_order=False, **keywords)


DIRECTIONS = ("forward", "reverse", "bidirectional")
ROWS = [
    *(row("LSTM", d, extra) for d in DIRECTIONS for extra in (
        (), ("b",), ("b", "h"), ("b", "lens"), ("b", "h", "c"), ("b", "lens", "h", "c"), ("b", "h", "c", "p"),
        ("b", "lens", "h", "c", "p"),
    )),
    *(row("GRU", d, extra, attrs={"linear_before_reset": lbr})
      for d, lbr in itertools.product(DIRECTIONS, (0, 1))
      for extra in ((), ("b",), ("b", "h"), ("b", "lens"), ("b", "lens", "h"))),
    *(row("RNN", d, extra) for d in DIRECTIONS for extra in ((), ("b",), ("b", "lens", "h"))),
    *(row(op, extra=("b",), opset=o) for op in GATES for o in (13, 14, 22)),
    row("LSTM", extra=("b",), attrs={"activations": ["HardSigmoid", "Softsign", "Elu"]}),
    row("GRU", extra=("b",), attrs={"activations": ["HardSigmoid", "Softplus"]}),
    row("RNN", extra=("b",), attrs={"activations": ["Tanh"]}),
]  # fmt: skip
