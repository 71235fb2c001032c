"""`python .github/check_version.py v1.2.3`: the tag of a release is the version in pyproject.toml and CITATION.cff."""

import re
import sys
import tomllib
from pathlib import Path

root = Path(__file__).parents[1]
version = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
(cited,) = re.findall(r"^version: (.+)$", (root / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
tag = sys.argv[1]
if not tag.removeprefix("v") == version == cited:
    sys.exit(f"the tag is {tag}, pyproject.toml says {version}, CITATION.cff says {cited}")
