"""The proof of a training model that was built before, or of a model of derivatives."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from onnx import ModelProto

from onnxgrad_cli.common import checks
from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.compat.artifacts import with_stored
from onnxgrad_cli.execution.endless import check_ends
from onnxgrad_cli.execution.judged import judged
from onnxgrad_cli.files import ModelSource, load_external_data, own_model
from onnxgrad_cli.files.start_values import lacking, values_beside, with_values
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.jobs.proof_data import ProofData, fit
from onnxgrad_cli.metadata import describe, read_derived
from onnxgrad_cli.verification.derived import prove_derived, roles_of
from onnxgrad_cli.verification.proof import prove
from onnxgrad_cli.verification.verdict import Proof


@judged
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
    """Prove the gradients of a training model that `run_build` wrote, or the derivatives that `run_derive` did.

    Args:
        model: the training model, or the model of derivatives; '-' is stdin.
        data: an .npz with arrays for its inputs and weights, by name, or data to train on, of which the first samples
            are taken; what is missing is drawn at random.
        tokenizer: what makes tokens of text in these data: a tokenizer.json, or the folder that it is in.
        original: the model that it was made from: what it computes is compared, and second derivatives need it.
        sizes: sizes of symbolic dimensions, for what is drawn.
        seed: of what is drawn.

    Raises:
        UsageError: it is neither, or the data do not fit it.
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
    before = _with_own_weights(*own_model(original)) if original is not None else None
    given = ProofData.of(data, checks.path_or_none("tokenizer", tokenizer))
    arrays, measured = fit(given, proto, roles, tell, () if derived is None else derived.inputs)
    bound = {**(sizes or {}), **measured}

    def note(check: str) -> None:
        tell(f"checking: {check}", 1)

    if derived is not None:
        return prove_derived(proto, derived, path, before, arrays, bound, seed, force=True, note=note)
    check_ends(Graph(proto))
    return prove(proto, roles, path, before, arrays, bound, seed, force=True, note=note)


def _with_own_weights(model: ModelProto, path: Path | None) -> ModelProto:
    """A model with its external data, which lie beside another file than those of the model that is checked."""
    load_external_data(model, path)
    return model
