"""Compare the training models that two commits build: `python -m tools.digests BASE`, or `make digests BASE=main`.

The samples, the zoo and the intake are built for each target: plain, and with AdamW, LoRA or recomputation. The result
of a build is the sha256 of the files that it wrote, or its exit code and message if it failed. A refactoring must not
change any result.

Both commits run the same list of builds. The sources of BASE are extracted into a temporary folder. The results of BASE
are stored in build/digests/COMMIT.json and reused. Those of the working tree are stored in current.json beside it.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tarfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import indent
from typing import NamedTuple

from tests import intake  # not tests.zoo, which imports onnxgrad_cli before `prepare` has set its path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "digests"

TARGETS = ("standard", "portable", "ort-cpu", "ort-cuda")
VARIANTS = {
    "plain": (),
    "adamw": ("--optimizer", "adamw"),
    "lora": ("--lora", "4"),
    "recompute": ("--recompute", "elementwise"),
}
ALWAYS = ("--no-verify", "--no-report", "--quiet")
"""The options of each build."""

OTHER_NAMES = {"--no-verify": ("--no-check",)}
"""Option -> its names at other commits. A build uses the name that the help of its commit lists."""

CLASSIFIERS = ("digits_cnn", "digits_mlp", "symbolic", "tiny_transformer")
"""The samples that are built with cross-entropy."""

QUICK = (
    *"zoo/bert zoo/edgenext zoo/gcn zoo/gpt2 zoo/gru zoo/lstm_lm zoo/t5 zoo/unet2d_monai".split(),
    *"intake/fp16_ts_cnn_o17 intake/genai_llama_int4_cpu intake/opt_llama intake/sk_gpr".split(),
    "intake/qdq_ts_cnn_o17 --quantization ste",
)
"""Models in the subset 'quick', in addition to the samples. It builds each variant of a model for only one target."""

LIBRARIES = ("numpy", "onnx", "onnxruntime", "protobuf")
"""The packages that a stored result depends on."""


class Model(NamedTuple):
    """A model and the options to build it with.

    Attributes:
        name: the name of the model, such as 'zoo/swin'. It ends with the options if there are several cases of a file.
        path: the file of the model.
        loss: the name or the file of the loss.
        options: further options of `onnxgrad build`.
    """

    name: str
    path: Path
    loss: str
    options: tuple[str, ...] = ()


class Build(NamedTuple):
    """A build of a training model for which a digest is computed.

    Attributes:
        name: the names of the model, the target and the variant.
        words: the arguments of `onnxgrad build`, except the output.
        source: the digest of the files that the build reads.
    """

    name: str
    words: tuple[str, ...]
    source: str


Entry = dict[str, str]
"""The command of a build, the digest of the files that it reads, and its result."""


def models(zoo: Path, intake_folder: Path) -> Iterator[Model]:
    """Yield the samples, and the models of the zoo and of the intake."""
    for path in sorted((ROOT / "sample_models").glob("*.onnx")):
        yield Model(f"samples/{path.stem}", path, "cross-entropy" if path.stem in CLASSIFIERS else "mse")
    for path in sorted(zoo.glob("*/model.onnx")):
        output = json.loads((path.parent / "about.json").read_text())["output"]
        yield Model(f"zoo/{path.parent.name}", path, f"mse:{output}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    for case in intake.every_case(intake_folder) if intake_folder.is_dir() else ():
        loss = case.loss_file(intake_folder, FOLDER)
        name = " ".join([f"intake/{case.name}", *([loss.stem] if loss else []), *case.options])
        yield Model(name, case.model_file(intake_folder), str(loss or "mse"), case.options)


def builds(chosen: Iterable[Model], quick: bool = False) -> Iterator[Build]:
    """Yield the builds of models: all of them, or the subset 'quick'."""
    for turn, model in enumerate(chosen):
        if quick and not model.name.startswith("samples/") and model.name not in QUICK:
            continue
        loss = [Path(model.loss)] if model.loss.endswith(".onnx") else []
        source = digest([*sorted(model.path.parent.glob(f"{model.path.name}*")), *loss])
        for (row, target), (column, variant) in product(enumerate(TARGETS), enumerate(VARIANTS)):
            if quick and (row + column + turn) % len(TARGETS):
                continue
            words = (str(model.path), "--loss", model.loss, *model.options, "--target", target, *VARIANTS[variant])
            yield Build(f"{model.name} {target} {variant}", (*words, *ALWAYS), source)


def digest(paths: Iterable[Path]) -> str:
    """Return the sha256 of the names and contents of files."""
    found = hashlib.sha256()
    for path in paths:
        found.update(f"{path.name} {path.stat().st_size}\n".encode())
        found.update(path.read_bytes())
    return found.hexdigest()


# -- in the processes that build --------------------------------------------------------------------------------------


def prepare(tree: Path) -> None:
    """Make this process import onnxgrad_cli from `tree`, and load the modules that a build needs.

    Builds run in forks of this process, so the modules are loaded once. Loading them takes longer than most builds.
    """
    sys.path.insert(0, str(tree))
    spec = find_spec("onnxgrad_cli")
    assert spec and spec.origin and Path(spec.origin).is_relative_to(tree), f"{spec} is not in {tree}"
    with TemporaryDirectory() as folder:
        modules = Path(folder, "modules.txt")
        words = (str(ROOT / "sample_models" / "linear_regression.onnx"), *VARIANTS["adamw"], "-o", "out.onnx")
        run(words, Path(folder), lambda: modules.write_text("\n".join(sys.modules)))
        for name in modules.read_text().split():
            if not name.endswith("__main__"):
                with suppress(ImportError):
                    import_module(name)


def run(words: Iterable[str], folder: Path, after: Callable[[], object] = lambda: None) -> int:
    """Run `onnxgrad build` in a forked process and return its exit code.

    Args:
        words: the arguments of the command.
        folder: the working directory. The standard error output is written to stderr.txt in it.
        after: function that the forked process calls at its end.
    """
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        os.chdir(folder)
        os.dup2(os.open("stderr.txt", os.O_WRONLY | os.O_CREAT), 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.argv = ["onnxgrad", "build", *words]
        runpy.run_module("onnxgrad_cli", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        after()
        sys.stderr.flush()
        os._exit(code)


def result(build: Build) -> str:
    """Build, and return the digest of the written files, or the exit code and message."""
    with TemporaryDirectory() as folder:
        code = run((*build.words, "-o", "train.onnx"), Path(folder))
        files = sorted(Path(folder).glob("train.onnx*"))
        if code == 0 and files:
            return digest(files)
        return f"exit code {code}: {Path(folder, 'stderr.txt').read_text(errors='replace').strip()}"


# -- two commits ------------------------------------------------------------------------------------------------------


def results(
    tree: Path, wanted: Iterable[Build], file: Path, processes: int = 2, reuse: bool = False
) -> dict[str, Entry]:
    """Run builds with the sources in `tree` and store their results.

    Args:
        tree: the folder that contains the package onnxgrad_cli.
        wanted: the builds.
        file: the file for the results.
        processes: the number of builds that run at the same time.
        reuse: True to take results from the file if the build, its model and the libraries have not changed.

    Returns:
        The name of each build -> its command, source and result.
    """
    start, libraries = time.monotonic(), {name: version(name) for name in LIBRARIES}
    stored = json.loads(file.read_text()) if reuse and file.exists() else {}
    known: dict[str, Entry] = stored["results"] if stored.get("libraries") == libraries else {}
    entries: dict[str, Entry] = {}
    missing = []
    for build in wanted:
        build = build._replace(words=tuple(spelled(build.words, tree)))
        command = shlex.join(["onnxgrad", "build", *build.words])
        entries[build.name] = entry = {"command": command, "source": build.source}
        if known.get(build.name, {}).items() >= entry.items():
            entry.update(known[build.name])
        else:
            missing.append(build)
    if missing:
        with ProcessPoolExecutor(processes, get_context("spawn"), prepare, (tree,)) as pool:
            for build, found in zip(missing, pool.map(result, missing), strict=True):
                entries[build.name]["result"] = found
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"libraries": libraries, "results": known | entries}, indent=1))
    failed = sum(is_failure(entry) for entry in entries.values())
    print(
        f"{file.stem[:12]}: {len(entries) - failed} models, {failed} refused or failed; "
        f"{len(missing)} built in {time.monotonic() - start:.0f} s, {len(entries) - len(missing)} known from before",
        flush=True,
    )
    return entries


def is_failure(entry: Entry) -> bool:
    """Return True if a build wrote no model."""
    return entry["result"].startswith("exit code")


def spelled(words: Iterable[str], tree: Path) -> Iterator[str]:
    """Yield the arguments of a build, with the names that the options have in the sources in `tree`.

    Raises:
        SystemExit: an option doesn't exist in these sources.
    """
    for word in words:
        names = [word, *OTHER_NAMES.get(word, ())] if word.startswith("--") else []
        name = next((name for name in names if name in options(tree)), word)
        if names and name not in options(tree):
            raise SystemExit(
                f"`onnxgrad build` in {tree} has no {word}: add its name there to OTHER_NAMES in {__file__}"
            )
        yield name


@cache
def options(tree: Path) -> frozenset[str]:
    """Return the options that the help of `onnxgrad build` lists, with the sources in `tree`."""
    command = [sys.executable, "-m", "onnxgrad_cli", "build", "--help-all"]
    text = subprocess.run(command, cwd=tree, check=True, stdout=subprocess.PIPE, text=True).stdout
    return frozenset(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", text))


def extract(commit: str, folder: Path) -> None:
    """Write the package of a commit to a folder."""
    archive = subprocess.run(["git", "archive", commit, "onnxgrad_cli"], cwd=ROOT, check=True, stdout=subprocess.PIPE)
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")


def differences(before: dict[str, Entry], after: dict[str, Entry]) -> Iterator[str]:
    """Yield a description of each build whose results differ."""
    for name, entry in after.items():
        old = before[name]
        if old["result"] != entry["result"]:
            text = f"was: {old['result']}\nis:  {entry['result']}\nby:  {entry['command']}"
            yield f"{name}\n{indent(text, '  ')}"


def main() -> int:
    """Print the builds whose results differ. Return 1 if there are any, and 0 otherwise."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", help="commit to compare the working tree with")
    parser.add_argument("--zoo", type=Path, default=ROOT / "../shared/zoo")
    parser.add_argument("--intake", type=Path, default=ROOT / "../shared/intake")
    parser.add_argument("--subset", choices=("all", "quick"), default="all")
    parser.add_argument("-j", "--processes", type=int, default=2)
    arguments = parser.parse_args()
    name = ["git", "rev-parse", "--verify", "--quiet", f"{arguments.base}^{{commit}}"]
    commit = subprocess.run(name, cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout.strip()
    if not commit:
        parser.error(f"there is no commit '{arguments.base}'")
    for folder, variable in ((arguments.zoo, "ZOO"), (arguments.intake, "INTAKE")):
        if not folder.is_dir():
            print(f"left out: there is no folder '{folder}': name it with {variable}=")
    every = list(models(arguments.zoo.resolve(), arguments.intake.resolve()))
    chosen = list(builds(every, arguments.subset == "quick"))
    print(f"{arguments.subset}: {len(chosen)} builds of the {len(list(builds(every)))} of {len(every)} models")
    with TemporaryDirectory() as folder:
        extract(commit, Path(folder))
        before = results(Path(folder), chosen, FOLDER / f"{commit}.json", arguments.processes, reuse=True)
    after = results(ROOT, chosen, FOLDER / "current.json", arguments.processes)
    found = list(differences(before, after))
    print(*found, sep="\n")
    print(f"{len(found)} of {len(chosen)} builds differ")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
