"""`make test-lowest` installs the lowest versions of packages that pyproject.toml allows."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def constraints(name: str) -> dict[str, tuple[int, ...]]:
    lines = (ROOT / ".ci" / f"constraints-{name}.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if not line.startswith("#"))
    return {package: tuple(map(int, version.split("."))) for package, version in pairs}


def test_the_lowest_constraints_are_the_lower_bounds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lowest, newest = constraints("lowest"), constraints("newest")
    assert set(lowest) == set(newest)
    for requirement in project["dependencies"]:
        package, bound = re.fullmatch(r"([\w-]+)>=([\d.]+)", requirement).groups()
        parts = [*map(int, bound.split("."))]
        assert lowest[package] == tuple(parts + [0] * (3 - len(parts))), requirement
    assert all(lowest[package] <= newest[package] for package in lowest)
