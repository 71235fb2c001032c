"""No two classes of the package have the same name, so that a search for a name finds one class."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import onnxgrad_cli

PACKAGE = Path(onnxgrad_cli.__file__).parent
CLASS = re.compile(r"^ *class (\w+)[(:]", re.MULTILINE)


def test_no_two_classes_have_the_same_name() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for found in CLASS.finditer(path.read_text(encoding="utf-8")):
            places[found[1]].append(str(path.relative_to(PACKAGE)))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}
