"""The values that rules use, and their refusals."""

from __future__ import annotations

from tests.emission.test_emitter import emitter


def test_a_refusal_has_its_reason_and_a_hint() -> None:
    found = emitter().no("it has none", "leave it")
    assert (found.reason, found.hint) == ("it has none", "leave it")
