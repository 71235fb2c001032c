"""Build training models from a folder of exported models, as a user would, and check their losses and gradients.

    python -m tests.intake FOLDER [NAME ...]

`onnxgrad build` builds each model twice, without data and with its data as --test-data. The verdict must be the one in
`CASES`. The loss is compared with a loss of the original model's outputs. If the folder has gradients from the
framework that the model came from, each gradient is compared with those. Otherwise it is compared with central
differences of the original model on onnxruntime. Parameters are identified by their values, which may be transposed. A
value that several parameters have is not compared with the framework.

Files of a model NAME:

- NAME/model.onnx or NAME.onnx.
- NAME/feed.npz: `in/<input>` and `label/label`. A missing label is drawn at random.
- NAME/ref.npz: `p/<parameter>`, `g/<parameter>` in float64, and `loss`.

All models in `CASES` must exist. The exit code is 1 if any model is wrong or missing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
from onnx import AttributeProto, ModelProto, TensorProto, numpy_helper

Arrays = dict[str, np.ndarray]

BOUND, HALF_BOUND = 1e-4, 1e-2
"""Largest error against autograd, in float32 and in float16."""

DIFFERENCE_BOUND, HALF_DIFFERENCE_BOUND = 2e-2, 1e-1
"""Largest error against differences, in float32 and in float16. The error of a wrong gradient is about 1."""

STEPS = (3e-2, 1e-2, 3e-3, 1e-3, 3e-4)
"""Steps of differences, relative to the size of a weight. Large steps cross kinks, small ones have rounding errors."""

SAME = 2e-3
"""Largest difference of values of the same parameter, relative to its largest value. It covers rounding to float16."""

AUTOGRAD, DIFFERENCES = "(autograd)", "(differences)"
"""Suffixes of the names of gradients, for the two kinds of comparison."""

CAUSAL = """<ir_version: 8, opset_import: ["": 17]> causal (float[b, s, c] logits, int64[b, s] label) => (float loss) {
    t = Transpose<perm = [0, 2, 1]>(logits) loss = SoftmaxCrossEntropyLoss<ignore_index = -100>(t, label) }"""
"""A loss for language models, whose classes are the last axis."""


@dataclass(frozen=True)
class Case:
    """The options to build a model with, and the expected verdict.

    Attributes:
        name: the name of the model; several cases can have the same model.
        verdict: 'proved', 'not_proved', or 'refused' (exit code 3).
        says: a text that the reason of a verdict other than 'proved' must contain.
        options: more options of `onnxgrad build`.
        loss: the file of the loss in the folder, or the loss in ONNX's text format; mse by default.
        data: a file in the folder with the data by input name, used instead of feed.npz.
        draw: the shapes of the float inputs, for a model without data.
        noise: the float32 rounding error of the original's gradients if that is larger than `BOUND`. It is relative and
            was measured against float64.
        differ: False if the gradients are not derivatives, such as straight-through estimates.
    """

    name: str
    verdict: str = "proved"
    says: str = ""
    options: tuple[str, ...] = ()
    loss: str = ""
    data: str = ""
    draw: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    noise: float = 0.0
    differ: bool = True

    def model_file(self, folder: Path) -> Path:
        """Return the path of the model in the folder of the intake."""
        own = folder / self.name
        return own / "model.onnx" if own.is_dir() else folder / f"{self.name}.onnx"

    def loss_file(self, folder: Path, work: Path) -> Path | None:
        """Return the path of the loss, or None for mse. A loss in text format is written to a file in `work`."""
        if not self.loss.startswith("<"):
            return folder / self.loss if self.loss else None
        path = work / f"loss-{zlib.crc32(self.loss.encode()):08x}.onnx"
        onnx.save(onnx.parser.parse_model(self.loss), path)
        return path


IMAGE = {"image": (32, 3, 32, 32)}

NO_PAST = ("--dim", "past_sequence_length=0")

CASES = (
    Case("dy_cnn_o23"),
    Case("fp16_ts_cnn_o17"),
    Case("genai_llama_fp32_cpu"),
    Case("genai_llama_int4_cpu"),
    Case("genai_llama_int4_cpu", loss=CAUSAL, data="lm_nopast.npz"),
    Case("genai_llama_int4_cpu", options=NO_PAST, loss=CAUSAL, data="lm_nopast.npz"),
    Case("genai_phi3_fp16_cpu"),
    Case("genai_qwen3_fp32_cpu"),
    Case("genai_qwen3_int4_cpu"),
    Case("hf_clip_ts17"),
    Case("lvl_swin__ALL", "refused", "optimized for a specific machine"),
    Case("lvl_ts_enc_ALL"),
    Case("nbits_llamady_g"),
    Case("opt_llama"),
    Case("opti_llama_textgenerationwithpast"),
    Case("placeholders", draw={"x": (2, 3, 17, 12)}),
    Case("qdq_ts_cnn_o17", "refused", "--quantization ste"),
    Case("qdq_ts_cnn_o17", "not_proved", "straight-through", ("--quantization", "ste"), differ=False),
    Case("sk_gpr", noise=2e-3),
    Case("sk_logreg"),
    Case("surfaces_gbr", draw={"input": (6, 4)}),
    Case("t_gn", draw={"x": (2, 8, 7, 7)}),
    Case("tf_unet_o13"),
    Case("tutorial_training_mode", draw=IMAGE),
    Case("tutorial_training_mode", loss="loss_opset20.onnx", draw=IMAGE),
)


# -- the original model on onnxruntime, without onnxgrad ----------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """The place in a model where a weight is stored.

    Attributes:
        proto: the tensor, or an attribute with a list of floats.
        transposed: True if the attribute stores the transposed weight.
    """

    proto: TensorProto | AttributeProto
    transposed: bool = False

    def put(self, value: np.ndarray) -> None:
        """Store another value in the type of the stored one."""
        if isinstance(self.proto, AttributeProto):
            self.proto.floats[:] = (value.T if self.transposed else value).ravel().tolist()
        else:
            dtype = numpy_helper.to_array(self.proto).dtype
            self.proto.CopyFrom(numpy_helper.from_array(value.astype(dtype), self.proto.name))


class Original:
    """The inference model on onnxruntime, with replaceable weights and a loss.

    Attributes:
        model: the model with its weights.
        output: the output that the loss is computed on.
    """

    def __init__(self, path: Path, loss: ModelProto | None) -> None:
        self.model = onnx.load(path)
        for node in self.model.graph.node:  # differences don't work if a node quantizes its activations
            for attribute in [each for each in node.attribute if each.name == "accuracy_level"]:
                node.attribute.remove(attribute)
        self._tensors = {tensor.name: tensor for tensor in self.model.graph.initializer}
        self._lists: list[AttributeProto] = []
        for node in self.model.graph.node:
            for attribute in node.attribute:
                if node.op_type == "Constant" and attribute.name == "value":
                    self._tensors[node.output[0]] = attribute.t
                elif attribute.type == AttributeProto.FLOATS:
                    self._lists.append(attribute)
        self._loss = loss
        floats = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16)
        self.output = next(o.name for o in self.model.graph.output if o.type.tensor_type.elem_type in floats)

    def place(self, name: str, value: np.ndarray) -> Place | None:
        """Return the place of a weight: a tensor with its name, or an attribute with its values, perhaps transposed."""
        if name in self._tensors:
            return Place(self._tensors[name])
        for each in self._lists:
            for transposed in (False, True):
                ordered = value.T if transposed else value
                if np.array_equal(np.float32(each.floats), ordered.ravel()):
                    return Place(each, transposed)
        return None

    def outputs(self, feeds: Arrays) -> np.ndarray:
        """Return the value of `output` for feeds, in float64."""
        (output,) = session(self.model).run([self.output], feeds)
        return np.asarray(output, np.float64)

    def loss(self, output: np.ndarray, label: np.ndarray) -> float:
        """Return the loss of an output: mse in float64, or the result of the loss model."""
        if self._loss is None:
            return float(np.mean((output - label) ** 2))
        prediction, target = self._loss.graph.input
        run = session(self._loss).run(None, {prediction.name: np.float32(output), target.name: label})
        return float(run[0])

    def label(self, output: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return a random label for an output."""
        return np.asarray(
            rng.standard_normal(output.shape) if self._loss is None else rng.integers(0, output.shape[-1], len(output))
        )


def session(model: ModelProto) -> onnxruntime.InferenceSession:
    """Return a session that runs a model without graph optimizations, on one thread."""
    how = onnxruntime.SessionOptions()
    how.intra_op_num_threads, how.log_severity_level = 1, 4
    how.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model.SerializeToString(), how, providers=["CPUExecutionProvider"])


# -- the command ---------------------------------------------------------------------------------------------------


def command(*words: str) -> tuple[int, dict[str, Any], str]:
    """Run `onnxgrad build`. Return its exit code, its JSON result and its stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "onnxgrad_cli", "build", *words, "--json"], capture_output=True, text=True, check=False
    )
    return done.returncode, json.loads(done.stdout or '{"result": null}')["result"] or {}, done.stderr


def outcome(code: int, report: Mapping[str, Any], told: str) -> tuple[str, str]:
    """Return the verdict of a build, as in `Case.verdict`, and its reason."""
    proof = report.get("proof") or {}
    if code == 0 and report["status"] == "built":
        return proof.get("verdict", "no proof"), proof.get("why", "")
    return "refused" if code == 3 else f"exit code {code}", told


def role(report: Mapping[str, Any], name: str, ports: str) -> str:
    """Return the name of the first input or output with a role in a report."""
    return str(next(port["name"] for port in report[ports] if port["role"] == name))


class Trained:
    """A training model on onnxruntime.

    Attributes:
        weights: the trained weights, name -> value.
        half: True if the model has initializers in float16.
    """

    def __init__(self, model: ModelProto, report: Mapping[str, Any]) -> None:
        stored = {tensor.name: tensor for tensor in model.graph.initializer}
        self.weights = {each["name"]: numpy_helper.to_array(stored[each["name"]]) for each in report["weights"]}
        self.half = any(tensor.data_type == TensorProto.FLOAT16 for tensor in stored.values())
        self._session = session(model)
        self._label, self._loss = role(report, "label", "inputs"), role(report, "loss", "outputs")
        self._gradients = {each["name"]: each["gradient"] for each in report["weights"]}

    def run(self, feeds: Arrays, label: np.ndarray) -> tuple[float, Arrays]:
        """Return the loss, and the gradients of the weights in float64."""
        types = {"tensor(float16)": np.float16, "tensor(float)": np.float32}
        inputs = {value.name: types.get(value.type) for value in self._session.get_inputs()}
        fed = {name: x.astype(inputs[name] or x.dtype) for name, x in {**feeds, self._label: label}.items()}
        names = [self._loss, *self._gradients.values()]
        loss, *gradients = self._session.run(names, fed)
        return float(loss), {
            name: np.asarray(g, np.float64) for name, g in zip(self._gradients, gradients, strict=True)
        }


# -- one case ------------------------------------------------------------------------------------------------------


class Trial:
    """A run of a case in a folder of models.

    Attributes:
        feeds: the feeds of the original model.
        errors: name of a compared value -> its largest error, and the largest accepted error.
    """

    def __init__(self, case: Case, folder: Path, work: Path) -> None:
        self.case, self.work = case, work
        own = folder / case.name
        self.path = case.model_file(folder)
        self.errors: dict[str, tuple[float, float]] = {}
        rng = np.random.default_rng(0)
        self._rng = rng
        self.loss_file = case.loss_file(folder, work)
        self.original = Original(self.path, onnx.load(self.loss_file) if self.loss_file else None)
        self.feeds: Arrays = {
            name: np.asarray(rng.standard_normal(shape), np.float32) for name, shape in case.draw.items()
        }
        label: np.ndarray | None = None
        if case.data:
            self.feeds, label = self._named(dict(np.load(folder / case.data)))
        elif not case.draw:
            stored = np.load(own / "feed.npz")
            self.feeds = {key[3:]: stored[key] for key in stored.files if key.startswith("in/")}
            label = stored["label/label"] if "label/label" in stored.files else None
        self.reference = dict(np.load(own / "ref.npz")) if (own / "ref.npz").exists() and not case.loss else {}
        if case.verdict != "refused":
            output = self.original.outputs(self.feeds)
            self.label = self.original.label(output, rng) if label is None else label
            self.loss = self.original.loss(output, self.label)

    def _named(self, arrays: Arrays) -> tuple[Arrays, np.ndarray]:
        """Return the inputs and the label of data by input name. Inputs that the data lack are empty caches."""
        label = arrays.pop("label")
        batch = len(label)
        for value in self.original.model.graph.input:
            if value.name not in arrays:
                dims = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
                arrays[value.name] = np.zeros([batch, dims[1], 0, dims[3] or 16], np.float32)
        return arrays, label

    def judge(self) -> list[str]:
        """Build the model twice and return descriptions of everything that differs from the expected result."""
        case = self.case
        loss = ["--loss", str(self.loss_file)] if self.loss_file else ["--loss", "mse"]
        built, data = self.work / "train.onnx", self.work / "data.npz"
        words = [str(self.path), *loss, *case.options, "-o", str(built), "--force"]
        report: dict[str, Any] = {}
        for how in ("no data", "data"):
            if how == "data" and case.verdict != "refused":
                np.savez(data, **self.feeds, **{role(report, "label", "inputs"): self.label})  # type: ignore[arg-type]
                words += ["--test-data", str(data)]
            code, report, told = command(*words)
            verdict, why = outcome(code, report, told)
            if verdict != case.verdict or case.says not in why or (why and not case.says):
                return [f"with {how}: {verdict}: {why.strip() or told.strip()}"]
        return self._compare(Trained(onnx.load(built), report)) if case.verdict != "refused" else []

    def _compare(self, trained: Trained) -> list[str]:
        """Return descriptions of the wrong values among the loss and the gradients of a training model."""
        loss, gradients = trained.run(self.feeds, self.label)
        autograd, differences = (HALF_BOUND, HALF_DIFFERENCE_BOUND) if trained.half else (BOUND, DIFFERENCE_BOUND)
        autograd = max(autograd, self.case.noise)
        self.errors["loss"] = abs(loss - self.loss) / abs(self.loss), autograd
        known = {name: g for name, value in trained.weights.items() if (g := self._known(value)) is not None}
        largest = max((np.abs(g).max() for g in known.values()), default=0.0)
        for name, g in known.items():
            error = np.abs(gradients[name] - g).max() / max(np.abs(g).max(), 1e-4 * largest)
            self.errors[f"{name} {AUTOGRAD}"] = float(error), autograd
        lost = []
        norm = max(float(np.linalg.norm(g)) for g in gradients.values())
        for name in trained.weights if self.case.differ else ():
            if name in known:
                continue
            place = self.original.place(name, trained.weights[name])
            if place is None:
                lost.append(f"{name} has nothing to be compared with")
                continue
            error = self._difference(place, trained.weights[name], gradients[name], norm)
            self.errors[f"{name} {DIFFERENCES}"] = error, differences
        off = [f"{what}: {error:.1e}" for what, (error, bound) in self.errors.items() if not error <= bound]
        return [*off, *lost]

    def _known(self, value: np.ndarray) -> np.ndarray | None:
        """Return the reference gradient of the parameter with a value, or None unless exactly one parameter has it."""
        found = []
        for key in (key for key in self.reference if key.startswith("p/")):
            parameter, gradient = self.reference[key], self.reference["g/" + key[2:]]
            for p, g in ((parameter, gradient), *(((parameter.T, gradient.T),) if parameter.ndim == 2 else ())):
                if p.shape == value.shape and np.abs(p - value).max(initial=0) <= SAME * np.abs(p).max(initial=0):
                    found.append(g)
                    break
        return found[0] if len(found) == 1 else None

    def _difference(self, place: Place, weight: np.ndarray, gradient: np.ndarray, norm: float) -> float:
        """Return the error of a gradient along a random direction, compared with differences of the original.

        The error is relative. It is the smallest error of all steps.

        Args:
            place: the place of the weight in the original model.
            weight: the value of the weight.
            gradient: the gradient of the weight.
            norm: the largest norm of all gradients.
        """
        value = np.float64(weight)
        direction = np.asarray(self._rng.standard_normal(value.shape))
        scale = float(np.sqrt(np.mean(value**2))) or 1.0
        slope, errors = float(np.sum(gradient * direction)), []
        for step in STEPS:
            h = step * scale
            up, down = (self._loss_with(place, np.asarray(value + sign * h * direction)) for sign in (1, -1))
            errors.append(abs((up - down) / (2 * h) - slope) / max(float(np.linalg.norm(gradient)), 1e-3 * norm))
        return min(errors)

    def _loss_with(self, place: Place, value: np.ndarray) -> float:
        """Return the loss of the original model with another value of a weight."""
        own = place.proto.SerializeToString()
        place.put(value)
        try:
            return self.original.loss(self.original.outputs(self.feeds), self.label)
        finally:
            place.proto.ParseFromString(own)


def worst(errors: Mapping[str, tuple[float, float]], kind: str) -> str:
    """Return the largest error of a kind and the number of errors: '3.1e-07 of 12'."""
    found = [error for what, (error, _) in errors.items() if what.endswith(kind)]
    if not found:
        return "-"
    return f"{max(found):.1e}" + (f" of {len(found)}" if len(found) > 1 else "")


def every_case(folder: Path) -> list[Case]:
    """Return `CASES`, and for each other model in the folder a case with the verdict 'proved'."""
    named = {case.name for case in CASES}
    others = sorted(model.parent.name for model in folder.glob("*/model.onnx"))
    return [*CASES, *(Case(name) for name in others if name not in named)]


def row(case: Case, folder: Path) -> tuple[str, bool]:
    """Run a case. Return its line in the table, and True if its result is not the expected one."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as work:
        trial: Trial | None = None
        try:
            trial = Trial(case, folder, Path(work))
            off = trial.judge()
        except (OSError, ValueError, LookupError, RuntimeError) as error:
            off = [f"{type(error).__name__}: {error}"]
    errors = trial.errors if trial else {}
    shown = f"{worst(errors, 'loss'):>8} {worst(errors, AUTOGRAD):>12} {worst(errors, DIFFERENCES):>12}"
    seconds = time.perf_counter() - start
    verdict = f"OFF: {'; '.join(off)}" if off else "ok"
    return f"{case.name:34} {case.verdict:10} {shown} {seconds:5.1f}  {verdict}", bool(off)


def main() -> int:
    """Run the cases on all processors and print the table. Return 0 if all results are as expected, 1 otherwise."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("intake", type=Path)
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    if not arguments.intake.is_dir():
        print(f"there is no folder '{arguments.intake}': name it with INTAKE=", file=sys.stderr)
        return 1
    failed = 0
    cases = [case for case in every_case(arguments.intake) if not arguments.names or case.name in arguments.names]
    print(f"{'model':34} {'expected':10} {'loss':>8} {'autograd':>12} {'differences':>12} {'s':>5}  verdict")
    with ProcessPoolExecutor() as workers:
        for line, off in workers.map(partial(row, folder=arguments.intake), cases):
            failed += off
            print(line, flush=True)
    print(f"{len(cases) - failed} as expected, {failed} off")
    return 1 if failed or not cases else 0


if __name__ == "__main__":
    sys.exit(main())
