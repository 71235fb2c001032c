"""The verdict of a proof follows from all of its checks."""

from __future__ import annotations

from onnxgrad_cli.verification.verdict import FAILED, NOT_PROVED, PROVED, Proof, ProofStep


def test_a_verdict_follows_from_all_steps() -> None:
    proof = Proof()
    assert proof.verdict == NOT_PROVED and "nothing" in proof.why and not proof.failed
    proof.add(ProofStep("first", "passed", "", 0.1))
    assert proof.verdict == PROVED and proof.why == "" and not proof.failed
    proof.add(ProofStep("second", "skipped", "no data", 0.1))
    assert proof.verdict == NOT_PROVED and proof.why == "second: no data" and proof.status == "passed"
    proof.add(ProofStep("third", "failed", "wrong", 0.1))
    assert proof.verdict == FAILED and proof.why == "third: wrong" and proof.failed
    proof.add(ProofStep("fourth", "failed", "later", 0.1))
    assert proof.why == "third: wrong"
    given = Proof("skipped", "too large", [ProofStep("first", "passed", "", 0.1)])
    assert given.verdict == NOT_PROVED and given.why == "too large"
