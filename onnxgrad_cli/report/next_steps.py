"""Suggest next steps after a build: commands, and programs that train a few steps."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from onnxgrad_cli.common.escape import python_literal
from onnxgrad_cli.metadata import STORED
from onnxgrad_cli.report.model import Next, Report, Value


def next_steps(report: Report, training: Sequence[str]) -> Iterator[Next]:
    """Yield the next steps that suit the status of the report.

    Args:
        report: the report of the build.
        training: the command-line arguments with which `onnxgrad train` builds the same training model.
    """
    path = next((file.path for file in report.files if file.role == "training model"), "train.onnx")
    if report.status == "refused" and report.asked.model:
        why = "List what could be trained, and check the model again after a change"
        yield Next(why, "sh", f"onnxgrad inspect {shlex.quote(report.asked.model)}")
    if report.status == "check_failed" and report.asked.command:
        why = "Repeat the check with your own data; if it fails again, the gradients are wrong: please report the model"
        yield Next(why, "sh", f"{report.asked.command} --test-data data.npz")
    if report.status != "built":
        return
    if "--training-info" in report.asked.options:
        why = "Write the step and the initialization as plain models that the stock onnxruntime runs"
        yield Next(why, "sh", f"onnxgrad expand {shlex.quote(path)}")
        return
    if report.asked.model and not report.compact:
        command = shlex.join(["onnxgrad", "train", report.asked.model, *training])
        sets = [f"--data {name}=DATA" for name in dict.fromkeys(value.of for value in report.inputs if value.of)]
        yield Next("Train the model on your data", "sh", " ".join([command, *(sets or ["--data DATA"])]))
    words = shlex.split(report.asked.command) if report.asked.command else []
    if "--test-data" in words[:-1]:
        data = shlex.quote(words[words.index("--test-data") + 1])
        yield Next("Check the gradients of the file again", "sh", f"onnxgrad check {shlex.quote(path)} --data {data}")
    if report.compact:
        yield Next("Expand the Gradient node into standard operators", "sh", f"onnxgrad expand {shlex.quote(path)}")
    else:
        yield Next("Train a few steps with numpy and the stock onnxruntime", "python", _steps(path, report))


def _steps(path: str, report: Report) -> str:
    """Return a Python program that trains a few steps on random data. It reads the roles of inputs from the file."""
    fed = [value for value in report.inputs if value.role not in STORED]
    stored = "--embed-state" not in report.asked.options
    return _PROGRAM.format(
        path=python_literal(path),
        data="".join(f"    {python_literal(v.name)}: {_sample(v)},\n" for v in fed),
        descend="" if report.asked.optimizer else _DESCEND,
        rate="" if report.asked.optimizer else ", rate",
        value="" if report.asked.optimizer else ", 0.01",
        begin="" if stored else _BEGIN,
        if_="if" if report.asked.optimizer else "elif",
    )


def _sample(value: Value) -> str:
    """Return a Python expression that makes random values for an input."""
    sizes = [str(dim) if isinstance(dim, int) else "size" for dim in value.shape or ()]
    shape = f"({sizes[0]},)" if len(sizes) == 1 else f"({', '.join(sizes)})"
    dtype = {"float": "float32", "double": "float64"}.get(value.dtype, value.dtype)
    if value.role == "learning rate":
        return f'np.array(0.01, "{dtype}")'
    if not dtype.startswith("float"):
        return f'np.zeros({shape}, "{dtype}")'
    return f'random.standard_normal({shape}).astype("{dtype}")' if sizes else f'np.array(1, "{dtype}")'


def in_javascript(report: Report, model: Path, roles: Path) -> Next:
    """Return a program that trains a few steps in Node on random data, for a model whose weights are inputs.

    Args:
        report: the report of the build.
        model: the file of the training model.
        roles: the JSON file, in the same folder, with the roles of the inputs and the name of the file of weights.
    """
    fed = [value for value in report.inputs if value.role not in STORED]
    text = _IN_JAVASCRIPT.format(
        model=json.dumps(model.name),
        roles=json.dumps(roles.name),
        data="".join(f"  {json.dumps(v.name)}: {_tensor(v)},\n" for v in fed),
        replace=_NEXT if report.asked.optimizer else _DOWNHILL,
    )
    return Next("Train a few steps in Node, in the folder of these files: npm install onnxruntime-node", "js", text)


def _tensor(value: Value) -> str:
    """Return a JavaScript expression that makes a random tensor for an input."""
    dtype = {"float": "float32", "double": "float64"}.get(value.dtype, value.dtype)
    sizes = [dim if isinstance(dim, int) else SAMPLES for dim in value.shape or ()]
    if value.role == "learning rate":
        return f'tensor("{dtype}", [], () => 0.01)'
    return f'tensor("{dtype}", {sizes}, {"Math.random" if dtype.startswith("float") else "() => 0"})'


SAMPLES = 8
"""The size of each unknown axis in random example tensors."""

_IN_JAVASCRIPT = """\
import {{ readFileSync }} from 'node:fs';
import ort from 'onnxruntime-node';

const session = await ort.InferenceSession.create({model});
const roles = JSON.parse(readFileSync({roles}));
const bytes = new Uint8Array(roles.bytes); // what the file leaves out is zero
bytes.set(readFileSync(roles.values));
const held = {{}}; // weights and state
for (const [name, {{ type, array, dims, offset, size }}] of Object.entries(roles.inputs))
  if (offset !== undefined) held[name] = new ort.Tensor(type, new globalThis[array](bytes.buffer, offset, size), dims);

function tensor(type, dims, draw) {{
  const size = dims.reduce((product, dim) => product * dim, 1);
  return new ort.Tensor(type, Array.from({{ length: size }}, draw), dims);
}}
const data = {{ // put yours here
{data}}};
for (let step = 0; step < 5; step++) {{
  const found = await session.run({{ ...held, ...data }});
{replace}  console.log(step, found[roles.loss].data[0]);
}}
"""

_NEXT = """\
  for (const name in held) if (roles.inputs[name].next) held[name] = found[roles.inputs[name].next];
"""

_DOWNHILL = """\
  for (const name in held) {
    const { gradient, next } = roles.inputs[name];
    if (gradient) held[name].data.forEach((_, i, w) => (w[i] -= 0.01 * found[gradient].data[i]));
    if (next) held[name] = found[next];
  }
"""

_PROGRAM = """\
import json
import numpy as np, onnx, onnxruntime

path, size{rate}, random = {path}, 8{value}, np.random.default_rng(0)
data = {{  # put yours here
{data}}}
onnxruntime.set_default_logger_severity(3)  # it warns of each weight that can be fed
session = onnxruntime.InferenceSession(path)
roles = json.loads(session.get_modelmeta().custom_metadata_map["onnxgrad.roles"])
stored = {{t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}}
{begin}weights = {{name: stored[name] for name, role in roles["inputs"].items() if role in ("weight", "state")}}
for step in range(5):
    results = dict(zip(roles["outputs"], session.run(list(roles["outputs"]), {{**data, **weights}})))
    for name, output in roles["outputs"].items():
{descend}        {if_} output["role"] == "next state":
            weights[output["of"]] = results[name]
    print(step, *(results[name] for name, output in roles["outputs"].items() if output["role"] == "loss"))
"""

_BEGIN = """\
for name, state in roles["state"].items():  # no value of it is stored
    stored[name] = np.full(state["shape"], state["initial"], state["dtype"])
"""

_DESCEND = """\
        if output["role"] == "gradient" and output["of"] in weights:
            weights[output["of"]] = weights[output["of"]] - rate * results[name]
"""
