"""Mutation testing of a module: mutmut changes it in many small ways, and each change must make a test fail.

    python -m tests.mutants onnxgrad_cli/ir/graph.py ['*remove_unused*' ...]
    python -m tests.mutants onnxgrad_cli/emission --sample 150

Patterns select mutants by their names, which contain the names of functions and classes. `--sample` selects random
ones. The differences of the surviving mutants are printed. Each of these needs a test, or a reason in docs/mutants.md.
The mutants are created in a copy of the repository.
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
    "onnxgrad_cli/passes": "tests/passes",
    "onnxgrad_cli/passes/parameters": "tests/passes/parameters",
    "onnxgrad_cli/passes/rematerialization": "tests/passes/rematerialization",
    "onnxgrad_cli/execution/double.py": "tests/execution/test_double.py tests/verification/test_derivative_proof.py",
    "onnxgrad_cli/verification": "tests/verification/gradients/test_slopes.py "
    "tests/verification/gradients/test_directions.py "
    "tests/verification/gradients/test_judgement.py tests/verification/checks/test_agreement.py "
    "tests/verification/test_proof_checks.py tests/verification/test_feeds.py "
    "tests/verification/checks/test_batch_sizes.py tests/verification/test_derivative_proof.py "
    "tests/verification/checks/test_size_promises.py tests/verification/test_proof.py "
    "tests/verification/checks/test_optimizer_step.py tests/jobs/test_free_batch.py "
    "tests/targets/test_blocked_channels.py",
    "onnxgrad_cli/verification/checks/optimizer_step.py": "tests/verification/checks/test_optimizer_step.py",
    "onnxgrad_cli/verification/checks/reference_optimizers.py": "tests/verification/checks/test_optimizer_step.py",
    "onnxgrad_cli/training": "tests/training tests/jobs/train/test_lbfgs_options.py tests/jobs/test_evaluate.py "
    "tests/jobs/test_predict.py tests/checkpoints/test_validate_checkpoint.py tests/checkpoints/test_tensors.py",
    "onnxgrad_cli/jobs": "tests/jobs tests/explanations/test_tokens.py tests/explanations/test_attribution_picture.py "
    "tests/explanations/test_subject.py tests/compat/test_artifacts.py tests/files/test_start_values.py "
    "tests/checkpoints/test_integers.py tests/verification/test_written_file.py tests/cli/commands/test_build.py "
    "tests/common/test_inputs.py",
    "onnxgrad_cli/training/loop.py": "tests/training/test_loop.py",
}
"""Folder or module -> the fast tests for it. mutmut runs the tests that reach a mutant.

They run in this order until one fails. The most specific tests come first, and slow tests come last.
"""

MODULE = "MUTATED_MODULE"
"""Environment variable with the path of the mutated module, read by the tests' process."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests of a mutant in the order of `TESTS`. mutmut passes them in arbitrary order."""
    rooms = tests_of(os.environ[MODULE])
    items.sort(key=lambda item: next(i for i, room in enumerate(rooms) if item.nodeid.startswith(room)))


def tests_of(module: str) -> list[str]:
    """Return the tests of the longest entry in `TESTS` that contains a module."""
    found = [place for place in TESTS if Path(module).is_relative_to(place)]
    if not found:
        sys.exit(f"no tests are named for {module}: add them to TESTS in tests/mutants.py")
    return [path for path in TESTS[max(found, key=len)].split() if (ROOT / path).exists()]


def prepare(module: str) -> None:
    """Replace the working folder by a copy of the files that git doesn't ignore, configured for a module."""
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
    """Return the names of `count` random mutants."""
    none = subprocess.run([*mutmut, "run", "*none of them*"], cwd=WORK, check=False, capture_output=True, text=True)
    metas = sorted((WORK / "mutants").rglob("*.meta"))  # mutmut writes them before it fails because no name matches
    names = [name for meta in metas for name in json.loads(meta.read_text())["exit_code_by_key"]]
    if not names:
        sys.exit(none.stdout + none.stderr)
    print(f"{min(count, len(names))} of {len(names)} mutants, seed {seed}", flush=True)
    return random.Random(seed).sample(names, min(count, len(names)))


def main() -> None:
    """Mutate a module. Print the surviving mutants, then the number of mutants with each result."""
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
