"""Rows of onnxgrad_cli/autodiff/rules/norm.py."""

import numpy as np

from tests.harness import Case

POSITIVE = np.array([0.5, 1.3, 2.1])
CHANNELS = [(2, 3, 4, 5), (3,), (3,), (3,), POSITIVE]

SINGLE = {"step": 1e-2, "tolerance": 2e-3}


def single(*shape: int) -> np.ndarray:
    """float32 values."""
    return np.random.default_rng(1).uniform(-2, 2, shape).astype(np.float32)


ROWS = [
    # the rows through Mean and InvStdDev stand in tests/autodiff/rules/test_norm.py: these outputs are float32
    *(
        Case("LayerNormalization", [(2, 3, 4), (4,), (4,)], {"epsilon": e}, opset=o)
        for e in (1e-5, 0.3)
        for o in (17, 22)
    ),
    Case("LayerNormalization", [(2, 3, 4), (4,)], note="no bias"),
    Case("LayerNormalization", [(2, 3, 4), (3, 4), (3, 4)], {"axis": 1}),
    Case("LayerNormalization", [(2, 3, 4), (2, 3, 4), (2, 3, 4)], {"axis": 0}),
    Case("LayerNormalization", [(2, 3, 4), (2, 3, 4)], {"axis": -3}),
    *(Case("RMSNormalization", [(2, 3, 4), (4,)], {"epsilon": e}, opset=23) for e in (1e-5, 0.3)),
    Case("RMSNormalization", [(2, 3, 4), (3, 4)], {"axis": 1}, opset=23),
    Case("RMSNormalization", [(2, 3, 4), (1,)], {"axis": 1}, opset=23, executor="reference", note="broadcast scale"),
    *(Case("InstanceNormalization", [(2, 3, 4, 5), (3,), (3,)], opset=o) for o in (13, 18, 22)),
    Case("InstanceNormalization", [(2, 3, 4), (3,), (3,)], {"epsilon": 0.2}),
    Case("InstanceNormalization", [(2, 3, 2, 2, 3), (3,), (3,)]),
    # stash_type 11: float64 throughout
    *(
        Case("GroupNormalization", [(2, 6, 4, 3), (6,), (6,)], {"num_groups": n, "stash_type": 11}, opset=o)
        for n in (1, 2, 6)
        for o in (21, 23)
    ),
    Case("GroupNormalization", [(2, 6, 4), (6,), (6,)], {"num_groups": 3, "epsilon": 0.2, "stash_type": 11}, opset=21),
    *(Case("BatchNormalization", CHANNELS, {"epsilon": e}, opset=o) for e in (1e-5, 0.2) for o in (13, 14, 15, 22)),
    Case("BatchNormalization", [(4, 3), *CHANNELS[1:]], note="no spatial axes"),
    Case("BatchNormalization", [(2, 3, 4), *CHANNELS[1:]], {"momentum": 0.5}),
    *(
        Case("LpNormalization", [(2, 3, 4)], {"axis": a, "p": p}, opset=o, low=0.1)
        for a in (-1, 0, 1)
        for p in (1, 2)
        for o in (13, 22)
    ),
    Case("LpNormalization", [(2, 3, 4)], opset=22),
    Case("LpNormalization", [np.array([[0.5, -0.3, 1.2], [-2.0, 0.4, -0.7]])], {"p": 1}, opset=22, note="signs"),
    # float32, since neither onnxruntime nor onnx.reference computes it in float64
    *(
        Case("MeanVarianceNormalization", [single(2, 3, 2, 4)], {"axes": a}, opset=o, **SINGLE)
        for a in ([0, 2, 3], [0, 2], [-1])
        for o in (13, 18)
    ),
    # onnx.reference walks over the samples where it should over the channels, so there are as many of each
    *(
        Case("LRN", [(6, 6, 3, 2)], {"size": n, "alpha": 0.3, "beta": 0.6, "bias": 1.5}, opset=o, executor="reference")
        for n in (1, 2, 3, 4, 5, 9)
        for o in (13, 22)
    ),
    Case("LRN", [single(2, 7, 3, 2)], {"size": 3}, **SINGLE),
]
