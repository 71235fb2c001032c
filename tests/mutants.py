"""Mutation testing of a module: mutmut changes it in many small ways, and each change must make a test fail.

    python -m tests.mutants onnxgrad_cli/ir/graph.py ['*remove_unused*' ...]
    python -m tests.mutants onnxgrad_cli/emission --sample 150

Patterns choose among the mutants' names, which hold those of functions and classes; `--sample` takes some by chance.
What survives is shown as a difference: it gets a test, or a reason in docs/mutants.md. The work is done in a copy.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WORK = ROOT / "build" / "mutants"

TESTS = {
    "onnxgrad_cli/ir": "tests/ir tests/passes/prepare tests/emission tests/test_builder.py",
    "onnxgrad_cli/ir/graph.py": "tests/ir",
    "onnxgrad_cli/ir/renaming.py": "tests/ir",
    "onnxgrad_cli/emission": "tests/emission tests/autodiff/rules/test_control.py tests/autodiff/test_fusions.py "
    "tests/autodiff/test_kernel_variants.py",
    "onnxgrad_cli/autodiff/reverse.py": "tests/autodiff/test_reverse.py tests/autodiff/test_registry.py "
    "tests/autodiff/test_custom_operator.py tests/autodiff/test_fusions.py tests/test_builder.py",
    "onnxgrad_cli/passes/parameters": "tests/passes/parameters",
    "onnxgrad_cli/passes/rematerialization": "tests/passes/rematerialization",
    "onnxgrad_cli/execution/double.py": "tests/execution/test_deferred.py tests/execution/test_double.py "
    "tests/verification/test_derived.py",
    "onnxgrad_cli/verification": "tests/verification/test_slopes.py tests/verification/test_claims.py "
    "tests/verification/test_judgement.py tests/verification/test_agreement.py tests/verification/test_checks.py "
    "tests/verification/test_feeds.py tests/verification/test_batches.py tests/verification/test_derived.py "
    "tests/verification/test_sizes.py tests/verification/test_proof.py "
    "tests/verification/test_optimizer_step.py tests/jobs/test_free_batch.py tests/targets/test_targets.py",
    "onnxgrad_cli/verification/optimizer_step.py": "tests/verification/test_optimizer_step.py",
    "onnxgrad_cli/verification/reference_optimizers.py": "tests/verification/test_optimizer_step.py",
    "onnxgrad_cli/training/loop.py": "tests/training/test_loop.py",
}
"""Folder or module -> the tests that concern it and take seconds, of which those that reach a mutant are run on it.

They run in this order, until one fails: what is tested closely stands first, and what takes long last.
"""

MODULE = "MUTATED_MODULE"
"""The variable that tells the tests which module is mutated."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Bring the tests of a mutant, which mutmut names in no order, into that of TESTS."""
    rooms = tests_of(os.environ[MODULE])
    items.sort(key=lambda item: next(i for i, room in enumerate(rooms) if item.nodeid.startswith(room)))


def tests_of(module: str) -> list[str]:
    """The tests of the longest entry that the module lies in."""
    found = [place for place in TESTS if Path(module).is_relative_to(place)]
    if not found:
        sys.exit(f"no tests are named for {module}: add them to TESTS in tests/mutants.py")
    return [path for path in TESTS[max(found, key=len)].split() if (ROOT / path).exists()]


def prepare(module: str) -> None:
    """Copy what git knows to the working folder, with a configuration for the module; what lay there goes."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    files = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    shutil.rmtree(WORK, ignore_errors=True)
    for name in filter(None, files.split("\0")):
        if (ROOT / name).is_file():
            (WORK / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, WORK / name)
    settings = {
        "source_paths": ["onnxgrad_cli"],
        "only_mutate": [module if module.endswith(".py") else f"{module}/*"],
        "also_copy": ["docs", "sample_models", "benchmarks", "README.md"],
        "pytest_add_cli_args": [
            "--numprocesses=0",
            "-p",
            "tests.mutants",
            "-p",
            "no:cacheprovider",
            "-m",
            "not slow",
            "-x",
        ],
        "pytest_add_cli_args_test_selection": tests_of(module),
        "process_isolation": "forkserver",
    }
    with (WORK / "pyproject.toml").open("a") as file:
        file.write("\n[tool.mutmut]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items()))


def sample(mutmut: list[str], count: int, seed: int) -> list[str]:
    """The names of so many mutants, by chance."""
    none = subprocess.run([*mutmut, "run", "*none of them*"], cwd=WORK, check=False, capture_output=True, text=True)
    metas = sorted((WORK / "mutants").rglob("*.meta"))  # written before it is found that no name looks like this
    names = [name for meta in metas for name in json.loads(meta.read_text())["exit_code_by_key"]]
    if not names:
        sys.exit(none.stdout + none.stderr)
    print(f"{min(count, len(names))} of {len(names)} mutants, seed {seed}", flush=True)
    return random.Random(seed).sample(names, min(count, len(names)))


def main() -> None:
    """Mutate a module and say what survived, then how many there are of each fate."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("module", help="path of a module or folder, as onnxgrad_cli/ir/graph.py")
    parser.add_argument("names", nargs="*", help="patterns of the mutants' names; all by default")
    parser.add_argument("--sample", type=int, metavar="N", help="N of all mutants by chance, in place of names")
    parser.add_argument("--seed", type=int, default=0, help="of the chance")
    parser.add_argument("--workers", type=int, default=1)
    arguments = parser.parse_args()
    prepare(arguments.module)
    os.environ[MODULE] = arguments.module
    mutmut = [sys.executable, "-m", "mutmut"]
    names = sample(mutmut, arguments.sample, arguments.seed) if arguments.sample else arguments.names
    subprocess.run([*mutmut, "run", "--max-children", str(arguments.workers), *names], cwd=WORK, check=True)
    found = subprocess.run(
        [*mutmut, "results", "--all", "true"], cwd=WORK, check=True, capture_output=True, text=True
    ).stdout
    fates: Counter[str] = Counter()
    for line in found.splitlines():
        name, _, fate = line.strip().rpartition(": ")
        fates[fate] += 1
        if fate in ("survived", "no tests"):
            subprocess.run([*mutmut, "show", name], cwd=WORK, check=False)
    print(dict(fates))


if __name__ == "__main__":
    main()
