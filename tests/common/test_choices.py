"""The words of a choice are those that the library knows."""

from __future__ import annotations

from typing import get_args

from onnxgrad_cli.common import choices
from onnxgrad_cli.targets import TARGETS


def test_the_words_are_those_that_there_are() -> None:
    assert set(get_args(choices.TargetName)) == set(TARGETS)
