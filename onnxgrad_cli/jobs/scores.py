"""What explaining and attacking a model have in common: where results go, and the gradients of scores, proved."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from onnx import ModelProto

from onnxgrad_cli.common import checks
from onnxgrad_cli.common.narration import Tell
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.explanations.samples import Scored
from onnxgrad_cli.explanations.scorer import Scorer, differentiate_score
from onnxgrad_cli.explanations.subject import Subject
from onnxgrad_cli.files import check_target, followed
from onnxgrad_cli.jobs.derive import proof_of
from onnxgrad_cli.jobs.proof_data import ProofData
from onnxgrad_cli.options import Options

ONE_BY_ONE = "note: samples are run one by one: they are not proven to be independent of others in a batch"

Verdict = tuple[str, str]
"""What became of the proof of gradients, and why."""

UNPROVED: Verdict = ("not proved", "a proof was not to be made")


def file_for(
    out: str | Path | None, endings: Collection[str], model: ModelProto, path: Path | None, force: bool
) -> Path | None:
    """The file for results; None where there is to be none.

    Args:
        out: its name.
        endings: those of the forms that are written.
        model, path: the model, and where it was read from.
        force: replace a file that onnxgrad did not write.

    Raises:
        UsageError: the ending is none that is written, or a file would be replaced that must not be.
    """
    if out is None:
        return None
    target = followed(checks.path("out", out))
    if target.suffix.lower() not in endings:
        raise UsageError(f"'{target}' ends in none of {', '.join(endings)}", "name a file that does")
    check_target(target, model, path, force)
    return target


def proved_scorer(
    subject: Subject, score: str, what: Scored, fixed: int | None, options: Options, verify: bool | None, tell: Tell
) -> tuple[Scorer, Verdict]:
    """What runs a model and the gradient of a class's score by a subject, after that was proved.

    Args:
        subject: what is differentiated by.
        score: the value that is differentiated, of the classes of `what`.
        what: the output that is looked at.
        fixed: how many samples the model takes at once; None is any number.
        options: shapes and modes, as for a build.
        verify: whether gradients are proved; None where that takes a few seconds.
        tell: takes what is narrated.

    Raises:
        CheckFailed: a gradient is wrong, or there is no proof though one is asked for.
        UnsupportedError: the model can't be differentiated, or takes several samples at once that may mix.
    """
    derived = differentiate_score(subject, score, what.axis, options)
    verdict = UNPROVED
    if verify is not False:
        proof = proof_of(derived.model, subject.model, subject.path, ProofData(), options, verify is True, tell)
        verdict = proof.verdict, proof.why
    scorer = Scorer(subject, what.output, derived, fixed)
    if not derived.independent:
        tell(ONE_BY_ONE, 0)
    return scorer, verdict
