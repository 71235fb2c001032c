"""What `--target portable` costs in Python: `python -m tests.web.cost MODEL...`, all of the table by default.

Models whose two forms differ are run by turns, one run of each, so that what else the machine does meets both alike.
Printed are the portable form's time divided by the standard one's: of medians, and the quartiles of the rounds' ratios.
`axes` is a sum whose axes are seen at run time alone, of which nothing is to be summed.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import parser

from onnxgrad_cli import LossSpec, Options, build
from onnxgrad_cli.ir.node_values import with_bodies
from tests.web.table import ROWS, SAMPLE_DATA, source

SECONDS, LEAST = 4.0, 20
BROADCAST = """<ir_version: 10, opset_import: ["" : 18]> m (float[a, 1024] x, float[b, 1024] z) => (float[c, 1024] y)
<float[1024] w> { h = Mul(z, w)  y = Add(x, h) }"""


def broadcast() -> tuple[onnx.ModelProto, dict[str, np.ndarray], Options]:
    """One sum over axes that nobody knows before the model runs."""
    model = parser.parse_model(BROADCAST)
    del model.graph.initializer[:]
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal((256, 1024)).astype(np.float32) for name in ("x", "z", "label")}
    model.graph.initializer.append(onnx.numpy_helper.from_array(arrays["x"][0], "w"))
    return model, arrays, Options(losses=(LossSpec("mse"),), target="portable")


def ratios(source: Path | onnx.ModelProto, batch: Mapping[str, np.ndarray], options: Options) -> str | None:
    """The ratio of two forms' times; None where they are of the same operators."""
    models = [build(source, replace(options, target=target)).model for target in ("portable", "standard")]
    counts = [Counter(node.op_type for node in with_bodies(model.graph.node)) for model in models]
    if counts[0] == counts[1]:
        return None
    how = ort.SessionOptions()
    how.intra_op_num_threads = 1
    sessions = [ort.InferenceSession(model.SerializeToString(), how) for model in models]
    rounds: list[list[float]] = []
    began = time.perf_counter()
    while len(rounds) < LEAST or time.perf_counter() < began + SECONDS:
        each = []
        for session in sessions:
            start = time.perf_counter()
            session.run(None, batch)
            each.append(time.perf_counter() - start)
        rounds.append(each)
    times = np.array(rounds[2:])
    low, high = np.quantile(times[:, 0] / times[:, 1], [0.25, 0.75])
    medians = np.median(times, 0)
    more = {kind: counts[0][kind] - counts[1][kind] for kind in counts[0] | counts[1]}
    changed = ", ".join(f"{kind} {count:+}" for kind, count in sorted(more.items()) if count)
    return f"{medians[0] / medians[1]:.2f} [{low:.2f}-{high:.2f}], {medians[1] * 1e3:.2f} ms: {changed}"


def main() -> None:
    for name in sys.argv[1:] or (*SAMPLE_DATA, *ROWS, "axes"):
        found = ratios(*(broadcast() if name == "axes" else source(name)))
        print(f"{name}: {found or 'no difference'}", flush=True)


if __name__ == "__main__":
    main()
