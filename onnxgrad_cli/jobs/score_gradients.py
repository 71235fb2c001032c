"""Functions that `explain` and `attack` share: choose the output file, and build and check gradients of scores."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from onnx import ModelProto

from onnxgrad_cli.common import checks
from onnxgrad_cli.common.narration import Tell
from onnxgrad_cli.errors import wrong_value
from onnxgrad_cli.explanations.open_samples import Scored
from onnxgrad_cli.explanations.scorer import Scorer, differentiate_score
from onnxgrad_cli.explanations.subject import Subject
from onnxgrad_cli.files import check_target, resolve_output
from onnxgrad_cli.jobs.derive import proof_of
from onnxgrad_cli.jobs.proof_data import ProofData
from onnxgrad_cli.options import Options
from onnxgrad_cli.verification.verdict import NOT_PROVED

ONE_BY_ONE = "note: samples are run one by one, because they are not proven to be independent of others in a batch"


class Verdict(NamedTuple):
    """The verdict of a check of gradients, and the reason for the verdict."""

    verdict: str
    why: str


UNPROVED = Verdict(NOT_PROVED, "no proof was requested")


def file_for(
    out: str | Path | None, endings: Collection[str], model: ModelProto, path: Path | None, force: bool
) -> Path | None:
    """Return the path of the output file, after checking that it may be written; None if no name is given.

    Args:
        out: the name that the user gave, or None.
        endings: the suffixes of the supported formats.
        model, path: the model, and the file it was read from.
        force: replace a file that onnxgrad did not write.

    Raises:
        UsageError: the suffix is not supported, or an existing file would be replaced.
    """
    if out is None:
        return None
    target = resolve_output(checks.path("out", out))
    if target.suffix.lower() not in endings:
        raise wrong_value(f"'{target}' has no supported suffix", f"use one of {', '.join(endings)}")
    check_target(target, model, path, force)
    return target


def proved_scorer(
    subject: Subject, score: str, what: Scored, fixed: int | None, options: Options, verify: bool | None, tell: Tell
) -> tuple[Scorer, Verdict]:
    """Return a scorer, which computes the scores of a model and their gradients, and the verdict on the gradients.

    Args:
        subject: the value to differentiate by.
        score: the value to differentiate. Its classes are those of `what`.
        what: the output with the scores.
        fixed: the batch size of the model if it is fixed; None if it is dynamic.
        options: shapes and modes, as for a build.
        verify: True checks the gradients numerically; None checks them if that takes only a few seconds.
        tell: receives progress messages.

    Raises:
        CheckFailed: a gradient is wrong, or a requested proof was not possible.
        UnsupportedError: the model can't be differentiated, or its samples may affect each other and it requires
            batches.
    """
    derived = differentiate_score(subject, score, what.axis, options)
    verdict = UNPROVED
    if verify is not False:
        proof = proof_of(derived.model, subject.model, subject.path, ProofData(), options, verify is True, tell)
        verdict = Verdict(proof.verdict, proof.why)
    scorer = Scorer(subject, what.output, derived, fixed)
    if not derived.independent:
        tell(ONE_BY_ONE, 0)
    return scorer, verdict
