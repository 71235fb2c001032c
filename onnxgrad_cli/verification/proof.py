"""Prove a training model: run all checks on it.

It must be valid, load in onnxruntime, still compute the outputs of the original model, and have gradients that match
finite differences of its loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from onnx import ModelProto

from onnxgrad_cli.metadata import Roles
from onnxgrad_cli.verification.case import ProofCase
from onnxgrad_cli.verification.original_model import Original
from onnxgrad_cli.verification.proof_checks import CHECKS, checked
from onnxgrad_cli.verification.verdict import Proof
from onnxgrad_cli.verification.written_file import Ran


def prove(
    model: ModelProto,
    roles: Roles,
    path: Path | None = None,
    original: ModelProto | None = None,
    data: Mapping[str, np.ndarray] | None = None,
    sizes: Mapping[str, int] | None = None,
    seed: int = 0,
    force: bool = False,
    operations: int = 0,
    note: Callable[[str], object] = str,
    keep: Callable[[Ran], object] | None = None,
) -> Proof:
    """Check a training model on given or random data.

    Args:
        model: the training model; external data are relative to `path`.
        roles: the roles of its inputs and outputs.
        original: the inference model that it was made from, whose outputs it must still compute.
        data: arrays for its inputs; missing ones are drawn at random.
        sizes: sizes of symbolic dimensions for random data.
        seed: the seed of the random data and directions.
        force: check large models too, which takes longer than a few seconds.
        operations: the floating-point operations of one run, as far as they are known.
        note: called with the name of each check as the check begins.
        keep: called with the model's run, if it ran. The written file is later compared with this run.
    """
    before = Original(original, path) if original is not None else None
    case = ProofCase(
        model, roles, path, before, dict(data or {}), sizes or {}, np.random.default_rng(seed), force, operations
    )
    checks = CHECKS
    if roles.inner:
        from onnxgrad_cli.verification.loss_derivatives import agrees_inside  # few losses have derivatives in them

        checks = (*CHECKS, ("derivatives in the loss against differences", agrees_inside))
    proof = checked(case, checks, note)
    if keep and case.ran:
        keep(case.ran)
    return proof
