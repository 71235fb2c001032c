"""Measure the heuristics that choose parameters: their decisions, and their errors of both kinds.

    python -m tests.roles [--zoo FOLDER] [--intake FOLDER] [--only PATTERN]

In an export of PyTorch, a tensor is learned if it changes when the parameters that require a gradient change. This
includes products that the exporter has folded. Both exporters (the newer one needs onnxscript) export each network in
several states: new, after a training, and with weights rounded to bfloat16. Each file is measured with and without the
exporter's metadata. In the zoo, a tensor is learned if it has a reference gradient. In the intake, it is also learned
if `REVIEWED` does not list it.

A decision of a heuristic is counted as right or wrong only if the result without the heuristic is another one. `UNTOLD`
lists the errors that can't be avoided with the information in the file, with reasons. The exit code is 1 if there is
any other error.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import logging
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from onnx import ModelProto, numpy_helper
from torch import nn

from onnxgrad_cli.builder import TrainingModel, build
from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.ir.types import is_float
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.parameters import select
from onnxgrad_cli.passes.parameters.constants import ConstantRoles
from tests.passes.parameters.exported_modules import ROWS, Row
from tests.passes.parameters.test_exports import Exporter, moved, scripted, traced, unsigned

UNTIED = (select.UNTIED, select.QUANTIZED, "gradients are stopped", "a running statistic")
"""Beginnings of the reasons that are not given by heuristics."""

SAME = 2e-3
"""Largest difference of equal values, relative to the largest value. It covers rounding to float16."""

REVIEWED: dict[str, tuple[str, ...]] = {
    "dy_cnn_o23": ("val_11",),
    "fp16_ts_cnn_o17": ("*Constant_*", "*Resize_*"),
    "genai_*": ("*_cache", "*_scales", "const_*", "/model/constants/*"),
    "hf_clip_ts17": ("*Constant_*",),
    "lvl_ts_enc_ALL": ("*Constant_*",),
    "nbits_llamady_g": ("zeros", "unsqueeze_*", "val_*", "*_scales"),
    "opt_llama": ("*Constant_*",),
    "opti_llama_textgenerationwithpast": ("onnx::Expand_119", "*Constant_*"),
    "qdq_ts_cnn_o17": ("*Constant_*", "*_scale"),
    "sk_gpr": ("Di_Divcst", "kgpd_Mulcst", "gpr_Addcst"),
    "tf_unet_o13": ("scales__43", "roi__40", "*/add/y:0"),
    "digits_cnn": ("*.running_*",),
    "symbolic": ("val_14",),
    "tiny_transformer": ("constant_*",),
}
"""Pattern of models -> patterns of their constants, found by reading the files. Every other tensor is learned."""

UNTOLD: tuple[tuple[str, str, str], ...] = (
    ("rezero*unsigned*", "alpha", "only PyTorch's names tell a learned number from one in the code"),
    ("temperature*unsigned*", "temperature", "only PyTorch's names tell a learned number from one in the code"),
    ("clip*unsigned*", "exp", "only the newer exporter tells a folded parameter from a number in the code"),
    ("residual gains*", "*Mul_*", "two numbers that a softmax was folded into, without a name"),
    ("residual gains*unsigned*", "s*", "only the newer exporter tells a folded parameter from a number in the code"),
    ("luminance*unsigned*", "*", "only PyTorch's exporters tell a literal from a weight"),
    ("*learned start*new*", "?0", "a learned state begins as zeros, and a fixed one is zeros"),
    ("*learned start*newer, new, unsigned*", "val_*", "a learned state begins as zeros, and a fixed one is zeros"),
    ("learned fourier features*", "b", "fixed frequencies are random too"),
    ("codebook by averages*", "codes", "a learned codebook looks the same"),
    ("learned radial basis*new*", "*", "centers begin where fixed ones stay"),
    ("positions from sinusoids*new*", "positions", "positions begin where fixed ones stay"),
    ("quantile bins*", "*", "edges that data have given look like learned ones"),
    ("output units*", "*", "statistics of the labels look like a learned scale and shift"),
)
"""Pattern of a file, pattern of a tensor, and the reason why the file doesn't show the tensor's role.

In each case another network, in which the tensor has the other role, gives the same file.
"""


class Sample(NamedTuple):
    """A prepared model.

    Attributes:
        name: a description of the file.
        built: the model with its parameters chosen.
        learned: the tensors that are learned.
        known: the tensors whose role is known.
    """

    name: str
    built: TrainingModel
    learned: Collection[str]
    known: Collection[str]


@dataclass
class Counts:
    """The decisions of a heuristic.

    Attributes:
        decisions: the number of all decisions.
        right: the number of right decisions that change the result.
        wrong: the number of wrong decisions that change the result.
        trained: the number of constants that are trained.
        missed: the number of parameters that are not trained.
        files: the number of files in which a right decision changes the result.
    """

    decisions: int = 0
    right: int = 0
    wrong: int = 0
    trained: int = 0
    missed: int = 0
    files: int = 0


class Wrong(NamedTuple):
    """An error: the file, the tensor, and the heuristic that made the decision, with its reason."""

    file: str
    tensor: str
    heuristic: str
    reason: str

    @property
    def kind(self) -> str:
        """A description of the error."""
        return f"parameter not trained ({self.reason})" if self.reason else "constant trained"

    @property
    def untold(self) -> str:
        """The reason in `UNTOLD` why the file doesn't show the role, or ""."""
        return next((why for f, t, why in UNTOLD if fnmatchcase(self.file, f) and fnmatchcase(self.tensor, t)), "")


# -- the models -------------------------------------------------------------------------------------------------------


def rounded(net: nn.Module) -> nn.Module:
    """Return a copy of a network with parameters rounded to bfloat16, as published weights often are."""
    other = copy.deepcopy(net)
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.requires_grad:
                parameter.copy_(parameter.to(torch.bfloat16).float())
    return other


def arrays(built: TrainingModel) -> dict[str, np.ndarray]:
    """Return the stored float tensors of a prepared model."""
    training, stored = built.training, built.graph.initializers
    folder = str(built.graph.path.parent) if built.graph.path else ""
    names = [name for name in (*training.trained, *training.not_trained) if name in stored]
    names = [name for name in names if is_float(built.graph.types.get(name))]
    return {name: numpy_helper.to_array(stored[name], folder) for name in names}


def prepared(model: ModelProto | Path) -> TrainingModel:
    """Return a model with its parameters chosen."""
    source = model if isinstance(model, ModelProto) else str(model)
    return build(source, Options(), stop_after="prepare")


def admitted(path: Path) -> TrainingModel | None:
    """Return a model with its parameters chosen. If the model is refused, print the error and return None."""
    try:
        return prepared(path)
    except OnnxgradError as error:
        print(f"{path}: refused: {error.message}", file=sys.stderr)
        return None


def exports(row: Row, exporter: Exporter, label: str) -> Iterator[Sample]:
    """Yield the exported files of a network."""
    torch.manual_seed(0)
    net = row.net().eval()
    once = moved(net)
    twice = moved(once)
    inputs = row.inputs
    nets = [net, once, twice]
    if exporter is scripted:  # this exporter is much faster
        nets += [rounded(once), rounded(twice)]
    new, first, second, *halves = (exporter(each, inputs) for each in nets)
    states = {"new": (new, first), "trained": (first, second)} | ({"bfloat16": tuple(halves)} if halves else {})
    for state, files in states.items():
        for form, change in (("", None), (", unsigned", unsigned)):
            built, later = (prepared(change(file) if change else file) for file in files)
            before, after = arrays(built), arrays(later)
            known = before.keys() & after.keys()
            learned = {name for name in known if not np.array_equal(before[name], after[name], equal_nan=True)}
            yield Sample(f"{row.name} ({label}, {state}{form})", built, learned, known)


def zoo(folder: Path) -> Iterator[Sample]:
    """Yield the models of the zoo, which have reference gradients by name."""
    for path in sorted(folder.glob("*/model.onnx")):
        built = prepared(path)
        keys = np.load(path.with_name("reference.npz")).files
        untold = json.loads(path.with_name("about.json").read_text())["weights_without_reference"]
        learned = {key.removeprefix("grad/") for key in keys if key.startswith("grad/")}
        yield Sample(f"zoo/{path.parent.name}", built, learned, arrays(built).keys() - untold)


def intake(folder: Path) -> Iterator[Sample]:
    """Yield the models of the intake, which have reference gradients by value, or were reviewed."""
    for path in sorted((*folder.glob("*/model.onnx"), *folder.glob("*.onnx"))):
        name = path.parent.name if path.name == "model.onnx" else path.stem
        built = admitted(path)
        if built is None:
            continue
        reference = path.with_name("ref.npz") if path.name == "model.onnx" else None
        yield Sample(f"intake/{name}", built, _learned(name, built, reference), arrays(built).keys())


def _learned(name: str, built: TrainingModel, reference: Path | None = None) -> set[str]:
    """Return the tensors that `REVIEWED` doesn't list as constants, and all tensors with a reference gradient."""
    found = arrays(built)
    constants = [each for model, patterns in REVIEWED.items() if fnmatchcase(name, model) for each in patterns]
    learned = {each for each in found if not any(fnmatchcase(each, pattern) for pattern in constants)}
    if reference is not None and reference.exists():
        stored = np.load(reference)
        parameters = [stored[key] for key in stored.files if key.startswith("p/")]
        learned |= {each for each, values in found.items() if any(_is(values, p) for p in parameters)}
    return learned


def _is(values: np.ndarray, parameter: np.ndarray) -> bool:
    """Return True if a tensor has the values of a parameter, perhaps transposed or in another shape."""
    if values.size != parameter.size:
        return False
    bound = SAME * max(float(np.abs(parameter).max(initial=0)), 1e-12)
    return any(np.abs(values.ravel() - each.ravel()).max(initial=0) <= bound for each in (parameter, parameter.T))


def samples(folder: Path) -> Iterator[Sample]:
    """Yield the project's own sample models."""
    for path in sorted(folder.glob("*.onnx")):
        built = admitted(path)
        if built is None:
            continue
        yield Sample(f"sample_models/{path.stem}", built, _learned(path.stem, built), arrays(built).keys())


# -- the counts -------------------------------------------------------------------------------------------------------


def count(sample: Sample, table: Mapping[str, Counts]) -> Iterator[Wrong]:
    """Add the decisions about a model to the table, and yield the wrong results."""
    graph, training = sample.built.graph, sample.built.training
    roles = ConstantRoles(graph)
    others: dict[str, ConstantRoles] = {}
    helped: set[str] = set()
    for name in (*training.trained, *training.not_trained):
        why = training.not_trained.get(name, "")
        if name not in sample.known or name not in graph.initializers or why.startswith(UNTIED):
            continue
        decision = roles.decide(name)
        row, is_learned = table[decision.heuristic], name in sample.learned
        row.decisions += 1
        other = others.setdefault(decision.heuristic, ConstantRoles(graph, {decision.heuristic})).decide(name)
        if decision.heuristic != "default" and bool(other.reason) != bool(decision.reason):
            right = bool(decision.reason) != is_learned
            row.right += right
            row.wrong += not right
            helped.update([decision.heuristic] if right else [])
        if bool(why) == is_learned:
            row.missed += is_learned
            row.trained += not is_learned
            yield Wrong(sample.name, name, decision.heuristic, why)
    for heuristic in helped:
        table[heuristic].files += 1


def models(zoo_folder: Path, intake_folder: Path, only: str) -> Iterator[Sample]:
    """Yield all models, prepared."""
    exporters = {"older": scripted} | ({"newer": traced} if importlib.util.find_spec("onnxscript") else {})
    for row in ROWS:
        for label, exporter in exporters.items() if fnmatchcase(row.name, only) else ():
            yield from exports(row, exporter, label)
    if only == "*":
        yield from zoo(zoo_folder)
        yield from intake(intake_folder)
        yield from samples(Path("sample_models"))


def lines(table: Mapping[str, Counts]) -> Iterator[str]:
    """Yield the lines of the table."""
    yield f"{'heuristic':22}{'decisions':>10}{'right':>8}{'wrong':>7}{'files':>7}{'trained constants':>19}{'missed':>8}"
    for name, row in sorted(table.items()):
        yield (
            f"{name:22}{row.decisions:10,}{row.right:8,}{row.wrong:7,}{row.files:7,}{row.trained:19,}{row.missed:8,}"
        )


def grouped(errors: Iterable[Wrong]) -> Iterator[str]:
    """Yield a line for each error. Equal errors in several files of a network share a line."""
    found: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for wrong in errors:
        network, _, form = wrong.file.partition(" (")
        found[network, wrong.tensor, wrong.heuristic, wrong.kind, wrong.untold].append(form.rstrip(")"))
    for (network, tensor, heuristic, kind, untold), forms in found.items():
        where = f" [{'; '.join(filter(None, forms))}]" if any(forms) else ""
        yield f"  {network}: {tensor}: {heuristic}: {kind}{where}" + (f": {untold}" if untold else "")


def main() -> int:
    """Print the table and the errors. Return 0 if `UNTOLD` lists all errors, and 1 otherwise."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--zoo", type=Path, default=Path("../shared/zoo"))
    parser.add_argument("--intake", type=Path, default=Path("../shared/intake"))
    parser.add_argument("--only", default="*", help="only networks whose name matches")
    arguments = parser.parse_args()
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    table: dict[str, Counts] = defaultdict(Counts)
    errors: list[Wrong] = []
    files = 0
    for sample in models(arguments.zoo, arguments.intake, arguments.only):
        errors += count(sample, table)
        files += 1
        print(sample.name, file=sys.stderr)
    if not files:
        print(f"no network is called '{arguments.only}'", file=sys.stderr)
        return 1
    told, untold = [e for e in errors if not e.untold], [e for e in errors if e.untold]
    print(*lines(table), "", sep="\n")
    for title, group in (("errors", told), ("errors that no file can tell", untold)):
        print(f"{len(group)} {title}", *grouped(group), sep="\n")
    print(f"{files} files")
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main())
