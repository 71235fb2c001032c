"""Check the gradients of a training model, or the results of a model of derivatives, that was built before."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from onnxgrad_cli.common import checks
from onnxgrad_cli.common.flags import job
from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.compat.artifacts import with_stored
from onnxgrad_cli.execution.attribute_failures import attribute_failures
from onnxgrad_cli.execution.limits import check_ends
from onnxgrad_cli.files import ModelSource, own_model
from onnxgrad_cli.files.start_values import lacking, values_beside, with_values
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.jobs.proof_data import ProofData, fit
from onnxgrad_cli.metadata import describe, read_derived
from onnxgrad_cli.verification.derivative_proof import prove_derived, roles_of
from onnxgrad_cli.verification.original_model import with_weights
from onnxgrad_cli.verification.proof import prove
from onnxgrad_cli.verification.verdict import Proof


@attribute_failures
@job
def run_check(
    model: ModelSource,
    *,
    data: str | Path | None = None,
    tokenizer: str | Path | None = None,
    original: str | Path | None = None,
    sizes: Mapping[str, int] | None = None,
    seed: int = 0,
    tell: Tell = silent,
) -> Proof:
    """Check the gradients of a training model of `run_build`, or the derivatives in a model of `run_derive`.

    Args:
        model: the training model, or the model of derivatives; '-' is stdin.
        data: data on which they are checked: an .npz with arrays by the names of inputs and weights, or training data,
            of which the first samples are used. The values of other inputs are drawn at random.
        tokenizer: the tokenizer for text in these data: a tokenizer.json, or the folder that holds it.
        original: the inference model that `model` was built from. The outputs of both are compared. Second derivatives
            can only be checked with it.
        sizes: symbolic dimension -> its size, for random inputs.
        seed: the seed of random inputs.

    Raises:
        UsageError: the model is neither a training model nor a model of derivatives, or the data don't fit it.
        OnnxgradError: a file can't be read.
    """
    data, original = checks.path_or_none("data", data), checks.path_or_none("original", original)
    proto, path = own_model(model)
    derived = read_derived(proto)
    roles = roles_of(proto, derived) if derived is not None else describe(proto)
    if path is not None and derived is None:
        proto = with_stored(proto, path)
    elsewhere = lacking(proto, roles) if derived is None else []
    if elsewhere:
        proto = with_values(proto, values_beside(path, elsewhere))
    before = with_weights(*own_model(original)) if original is not None else None
    given = ProofData.of(data, checks.path_or_none("tokenizer", tokenizer))
    arrays, measured = fit(given, proto, roles, tell, () if derived is None else derived.inputs)
    bound = {**(sizes or {}), **measured}

    def note(check: str) -> None:
        tell(f"checking: {check}", 1)

    if derived is not None:
        return prove_derived(proto, derived, path, before, arrays, bound, seed, force=True, note=note)
    check_ends(Graph(proto))
    return prove(proto, roles, path, before, arrays, bound, seed, force=True, note=note)
