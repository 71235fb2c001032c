"""Compare derivatives of PyTorch's sample inputs with PyTorch's, and count the verdicts of the default check.

    python -m tests.opinfo [--folder FOLDER] [--samples N] [--only PATTERN] [--shard I/N]

PyTorch lists sample inputs of each of its operators ("OpInfo"). Each becomes a model of its tensors, exported with
static and with symbolic axes. `onnxgrad derive` writes its vjp with the default check, and the derivative is compared
with PyTorch's on the sample. Requires the packages onnxscript and expecttest.

The exports and the verdicts are stored in the folder. A second run continues the first one; `--again` checks the
exports again. The exit code is 1 if the check accepts a wrong derivative, or rejects more than 5 of 1,650 right ones.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from onnxgrad_cli.errors import CheckFailed, OnnxgradError
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.ir.types import shape_of
from onnxgrad_cli.jobs.derive import Derivation, run_derive
from onnxgrad_cli.metadata import read_derived
from onnxgrad_cli.verification.verdict import PROVED

FOLDER = Path("build/opinfo")

FORMS = ("static", "symbolic")

MOST_REJECTED = 5 / 1650
"""Largest share of right derivatives that the default check may reject."""

SAME = 2e-3
"""Largest distance of equal values, relative to the largest entry: both are computed in float32."""

LEAST = 1e-3
"""Size of the largest entry below which distances are rounding."""

PROOF, UNPROVED, REJECTED = "right, proved", "right, not proved", "right, rejected"
ACCEPTED, DIFFERS, WRONG = "wrong, proved", "differs from PyTorch, not proved", "wrong, rejected"
FAILS, REFUSED, OTHER, CRASHED = (
    "does not run on the sample",
    "refused",
    "the export computes something else",
    "the process ended",
)
NONE, CONVENTION = "not exported", "differs from PyTorch by convention"

CONVENTIONS = {
    "nn.functional.max_unpool*": "repeated indices: PyTorch gives each the whole cotangent, not the last alone"
}
"""Pattern of a case -> the convention by which PyTorch's derivative differs from the derivative of the model."""


class Sample(NamedTuple):
    """Operator and position of a sample, and the form of its export: one of `FORMS`."""

    op: str
    at: int
    form: str

    @property
    def name(self) -> str:
        return f"{re.sub('[^a-zA-Z0-9_]', '.', self.op)}-{self.at}-{self.form}"


class Verdict(NamedTuple):
    """Kind of the outcome of a case, the reason, and the seconds it took."""

    kind: str
    why: str = ""
    seconds: float = 0.0


# -- exports ------------------------------------------------------------------------------------------------


class Call(nn.Module):
    """An operator as a function of the tensors of a sample. The outputs are its float results."""

    def __init__(self, op: Any, sample: Any) -> None:
        super().__init__()
        leaves, self.spec = tree_flatten((sample.input, sample.args, sample.kwargs))
        self.op, self.leaves = op, [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.tensors = tuple(leaf.detach().clone() for leaf in leaves if isinstance(leaf, Tensor))

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        leaves = list(self.leaves)
        for at, tensor in zip(self.places, tensors, strict=True):
            leaves[at] = tensor
        first, args, kwargs = tree_unflatten(leaves, self.spec)
        results = tree_flatten(self.op(first, *args, **kwargs))[0]
        return tuple(y for y in results if isinstance(y, Tensor) and y.is_floating_point())


def operators() -> dict[str, Any]:
    """Return PyTorch's operators that have a gradient in float32, by name."""
    from torch.testing._internal.common_methods_invocations import op_db

    found = (op for op in op_db if torch.float32 in op.dtypes and op.supports_autograd)
    return {f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name: op for op in found}


def export(op: Any, case: Sample, folder: Path) -> str:
    """Write the model of a sample and PyTorch's values to the folder. Return the reason if the export failed, or ""."""
    torch.manual_seed(case.at)
    sample = next(islice(op.sample_inputs("cpu", torch.float32, requires_grad=True), case.at, None), None)
    if sample is None:
        return "no such sample"
    call = Call(op, sample)
    values = _values(call)
    symbolic = tuple({axis: torch.export.Dim.AUTO for axis in range(x.ndim)} for x in call.tensors)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                call, call.tensors, dynamo=True, verbose=False,
                dynamic_shapes=(symbolic,) if case.form == "symbolic" else None,
                input_names=[f"x{i}" for i in range(len(call.tensors))],
            )  # fmt: skip
        assert program is not None
        onnx.save(program.model_proto, folder / f"{case.name}.onnx")
    except Exception as error:  # the exporter's exceptions share no base class
        return f"{type(error).__name__}: {str(error)[:200]}"
    np.savez(folder / f"{case.name}.npz", **values)  # type: ignore[arg-type]
    return ""


def _values(call: Call) -> dict[str, np.ndarray]:
    """Return inputs, outputs, cotangents and gradients by kind and position, such as 'input 0'.

    Raises:
        ValueError: PyTorch has no derivative of the sample.
    """
    moving = [x.clone().requires_grad_(x.is_floating_point()) for x in call.tensors]
    outputs = call(*moving)
    cotangents = [torch.randn_like(y) * y.requires_grad for y in outputs]  # zero if PyTorch has no derivative
    through = [(y, g) for y, g in zip(outputs, cotangents, strict=True) if y.requires_grad]
    floats = [x for x in moving if x.requires_grad]
    if not through or not floats:
        raise ValueError("no float output depends on a float input")
    ends, given = zip(*through, strict=True)
    by_id = dict(zip(map(id, floats), torch.autograd.grad(ends, floats, given, allow_unused=True), strict=True))
    outputs_only = [("cotangent", cotangents), ("output", list(outputs)), ("input", list(call.tensors))]
    found = {f"{kind} {i}": x.detach().numpy() for kind, each in outputs_only for i, x in enumerate(each)}
    gradients = {i: by_id.get(id(x)) for i, x in enumerate(moving)}
    return {**found, **{f"gradient {i}": g.detach().numpy() for i, g in gradients.items() if g is not None}}


# -- verdicts -----------------------------------------------------------------------------------------------


def judge(path: Path) -> Verdict:
    """Differentiate an export with the default check, and compare the derivative with PyTorch's."""
    start = time.process_time()
    with np.load(path.with_suffix(".npz")) as stored:
        values = {name: np.asarray(stored[name]) for name in stored.files}
    model = onnx.load(path)
    inputs = {value.name: values[f"input {i}"] for i, value in enumerate(model.graph.input)}
    contradicts = _contradicts(model, inputs)
    try:
        outputs = list(Executor(model)(inputs).values())
    except Exception as error:  # the executors' exceptions share no base class
        return Verdict(OTHER, str(error)[:200])
    if any(_apart(y, values[f"output {i}"]) > SAME for i, y in enumerate(outputs)):
        return Verdict(OTHER)
    rejected, why, proved = "", "", False
    try:
        try:
            derivation = run_derive(path, path.with_suffix(".vjp"), force=True)
            assert derivation.proof is not None
            proved, why = derivation.proof.verdict == PROVED, derivation.proof.why
        except CheckFailed as error:
            rejected = error.message
            derivation = run_derive(path, path.with_suffix(".vjp"), force=True, verify=False)
        difference = _difference(derivation, inputs, values, [value.name for value in model.graph.output])
    except OnnxgradError as error:
        return Verdict(REFUSED, error.message)
    except Exception as error:  # the executors' exceptions share no base class
        return Verdict(OTHER if contradicts else FAILS, str(error)[:200])
    finally:
        path.with_suffix(".vjp").unlink(missing_ok=True)
    seconds = time.process_time() - start
    convention = next((why for pattern, why in CONVENTIONS.items() if fnmatchcase(path.stem, pattern)), "")
    if difference and convention and not rejected:
        return Verdict(CONVENTION, f"{difference}; {convention}", seconds)
    if difference:
        return Verdict(WRONG if rejected else ACCEPTED if proved else DIFFERS, difference, seconds)
    return Verdict(REJECTED if rejected else PROOF if proved else UNPROVED, rejected or why, seconds)


def _contradicts(model: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> bool:
    """Return True if a symbol of the model has two sizes in the sample, such as 1 and 5, due to a wrong export.

    A derivative of such a model may fail to run, but it must not be wrong.
    """
    bound: dict[str, int] = {}
    declared = {value.name: shape_of(value.type) or () for value in model.graph.input}
    pairs = (pair for name, x in inputs.items() for pair in zip(declared[name], x.shape, strict=True))
    return any((bound.setdefault(dim, size) if isinstance(dim, str) else dim) != size for dim, size in pairs)


def _difference(
    derivation: Derivation, inputs: dict[str, np.ndarray], values: dict[str, np.ndarray], outputs: Sequence[str]
) -> str:
    """Return the name of a gradient that differs from PyTorch's and the difference, or an empty string."""
    said = read_derived(derivation.model)
    assert said is not None
    at = {name: i for i, name in enumerate(outputs)}
    cotangents = {name: values[f"cotangent {at[y]}"] for y, name in zip(said.of, said.inputs, strict=True)}
    taken = {value.name for value in derivation.model.graph.input}
    feeds = {name: x for name, x in {**inputs, **cotangents}.items() if name in taken}
    results = Executor(derivation.model)(feeds)
    names = list(inputs)
    for x, name in zip(said.wrt, said.outputs, strict=True):
        expected = values.get(f"gradient {names.index(x)}") if x in names else None
        expected = np.zeros_like(inputs[x]) if expected is None and x in names else expected
        if expected is not None and not (distance := _apart(results[name], expected)) <= SAME:
            return f"{name}: {distance:.1e}"
    return ""


def _apart(x: np.ndarray, y: np.ndarray) -> float:
    """Return the largest difference of two arrays, relative to the largest finite element of `y`. NaN equals NaN."""
    if x.shape != y.shape:
        return np.inf
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    with np.errstate(invalid="ignore"):
        apart = np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0.0, np.abs(x - y))
    return float(np.max(apart, initial=0.0) / max(np.max(np.abs(y), initial=0.0, where=np.isfinite(y)), LEAST))


# -- the run ------------------------------------------------------------------------------------------------


def run_operator(name: str, at: int, folder: Path, again: bool) -> list[tuple[str, Verdict]]:
    """Return the verdicts on one sample of an operator, one for each form."""
    logging.disable(logging.WARNING)
    return [(case.name, run(case, folder, again)) for case in (Sample(name, at, form) for form in FORMS)]


def run(case: Sample, folder: Path, again: bool) -> Verdict:
    """Export a sample if the export doesn't exist, and check it. The verdict is stored."""
    path, kept = folder / f"{case.name}.onnx", folder / f"{case.name}.json"
    if kept.exists() and (not again or not path.exists()):
        return Verdict(*json.loads(kept.read_text()))
    why = ""
    if not path.with_suffix(".npz").exists():
        try:
            why = export(operators()[case.op], case, folder)
        except Exception as error:  # PyTorch's exceptions share no base class
            why = f"{type(error).__name__}: {str(error)[:200]}"
    verdict = Verdict(NONE, why) if why else judge(path)
    kept.write_text(json.dumps(verdict))
    return verdict


def runs(args: argparse.Namespace, worker: list[ProcessPoolExecutor]) -> Iterator[tuple[str, Verdict]]:
    """Yield the verdicts on all cases. If the worker process crashes, only the sample it works on is lost."""
    shard, shards = map(int, args.shard.split("/"))
    names = [name for name in operators() if fnmatchcase(name, args.only)][shard::shards]
    for at in range(args.first, args.samples):
        for name in names:
            try:
                yield from worker[0].submit(run_operator, name, at, args.folder, args.again).result()
            except BrokenProcessPool:
                worker[0] = ProcessPoolExecutor(1)
                yield Sample(name, at, "").name, Verdict(CRASHED)


def report(found: dict[str, Verdict]) -> str:
    """Return the number of verdicts by form, and the reasons of all verdicts that may be a problem."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for name, verdict in found.items():
        counts[verdict.kind][name.rpartition("-")[2]] += 1
    lines = [f"{kind:<40}{' '.join(f'{counts[kind][form]:6}' for form in FORMS)}" for kind in sorted(counts)]
    aside = (PROOF, NONE, OTHER)
    lines += [f"{v.kind}: {name}: {v.why[:300]}" for name, v in sorted(found.items()) if v.kind not in aside]
    return "\n".join([f"{'':<40}{' '.join(f'{form[:6]:>6}' for form in FORMS)}", *lines])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--first", type=int, default=0, help="position of the first sample of each operator")
    parser.add_argument("--samples", type=int, default=4, help="samples of each operator")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="operators whose names match")
    parser.add_argument("--shard", default="0/1", metavar="I/N", help="the I-th of N parts")
    parser.add_argument("--again", action="store_true", help="judge again what has a verdict")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    worker = [ProcessPoolExecutor(1)]
    found = dict(runs(args, worker))
    worker[0].shutdown()
    print(report(found))
    kinds = Counter(verdict.kind for verdict in found.values())
    right = kinds[PROOF] + kinds[UNPROVED] + kinds[REJECTED]
    return int(kinds[ACCEPTED] > 0 or kinds[REJECTED] > MOST_REJECTED * right)


if __name__ == "__main__":
    sys.exit(main())
