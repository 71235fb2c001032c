"""The proof of a training model that was built before."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.compat.artifacts import with_stored
from onnxgrad_cli.execution.judged import judged
from onnxgrad_cli.files import ModelSource, own_model
from onnxgrad_cli.jobs.proof_data import fit, read_data
from onnxgrad_cli.metadata import describe
from onnxgrad_cli.verification.proof import Proof, prove


@judged
def run_check(
    model: ModelSource,
    *,
    data: Path | None = None,
    sizes: Mapping[str, int] | None = None,
    seed: int = 0,
    tell: Tell = silent,
) -> Proof:
    """Prove the gradients of a training model that `run_build` wrote.

    Args:
        model: the training model; '-' is stdin.
        data: an .npz with arrays for its inputs and weights, by name; what is missing is drawn at random.
        sizes: sizes of symbolic dimensions, for what is drawn.
        seed: of what is drawn.

    Raises:
        UsageError: it is no training model, or the data do not fit it.
        OnnxgradError: a file can't be read.
    """
    proto, path = own_model(model)
    roles = describe(proto)
    if path is not None:
        proto = with_stored(proto, path)
    arrays = read_data(data) if data else {}
    arrays, measured = fit(arrays, proto, roles, tell, data)
    return prove(proto, roles, path, None, arrays, {**(sizes or {}), **measured}, seed, force=True)
