"""JSON that every reader takes, whatever a model has for names and numbers."""

from __future__ import annotations

import json
import math

from onnxgrad_cli.common.strict_json import dumps


def test_what_json_has_no_word_for() -> None:
    value = {"a": [math.nan, -math.inf, 1.5], b"n\xff": (b"\xc3\xa9", None), "\x1b": True}
    text = dumps(value)
    assert json.loads(text) == {"a": [None, None, 1.5], "n\\xff": ["é", None], "\x1b": True}
    assert "\x1b" not in text
