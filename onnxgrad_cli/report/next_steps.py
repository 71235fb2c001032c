"""What a user does next with what was built: commands, and a program that trains a few steps."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

from onnxgrad_cli.common.visible import python_literal
from onnxgrad_cli.metadata import STORED
from onnxgrad_cli.report.model import Next, Report, Value


def next_steps(report: Report) -> Iterator[Next]:
    """What to do next, by the status of the report."""
    path = next((file.path for file in report.files if file.role == "training model"), "train.onnx")
    if report.status == "refused" and report.asked.model:
        why = "See what could be trained, and each obstacle again after a change"
        yield Next(why, "sh", f"onnxgrad inspect {shlex.quote(report.asked.model)}")
    if report.status == "check failed" and report.asked.command:
        why = (
            "Repeat it on data of your own; if the check fails again, the gradients are wrong: please report the model"
        )
        yield Next(why, "sh", f"{report.asked.command} --test-data data.npz")
    if report.status != "built":
        return
    if "--training-info" in report.asked.options:
        why = "Write the step and the initialization as plain models, which the stock onnxruntime runs"
        yield Next(why, "sh", f"onnxgrad expand {shlex.quote(path)}")
        return
    why = "Check the gradients on data of your own"
    yield Next(why, "sh", f"onnxgrad check {shlex.quote(path)} --data data.npz")
    if report.compact:
        yield Next("Write the Gradient node out, for runtimes", "sh", f"onnxgrad expand {shlex.quote(path)}")
    else:
        yield Next("Train a few steps with numpy and the stock onnxruntime", "python", _steps(path, report))


def _steps(path: str, report: Report) -> str:
    """A program that feeds random numbers and follows the gradients; it reads the roles from the model itself."""
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
    """The Python expression that makes random values for an input."""
    sizes = [str(dim) if isinstance(dim, int) else "size" for dim in value.shape or ()]
    shape = f"({sizes[0]},)" if len(sizes) == 1 else f"({', '.join(sizes)})"
    dtype = {"float": "float32", "double": "float64"}.get(value.dtype, value.dtype)
    if value.role == "learning rate":
        return f'np.array(0.01, "{dtype}")'
    if not dtype.startswith("float"):
        return f'np.zeros({shape}, "{dtype}")'
    return f'random.standard_normal({shape}).astype("{dtype}")' if sizes else f'np.array(1, "{dtype}")'


def in_javascript(report: Report, model: Path, roles: Path) -> Next:
    """How to train in Node where the weights are inputs: a program that feeds random numbers.

    Args:
        report: what was built.
        model: the training model's file.
        roles: the JSON beside it.
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
    """The JavaScript expression that makes a random tensor for an input."""
    dtype = {"float": "float32", "double": "float64"}.get(value.dtype, value.dtype)
    sizes = [dim if isinstance(dim, int) else SAMPLES for dim in value.shape or ()]
    if value.role == "learning rate":
        return f'tensor("{dtype}", [], () => 0.01)'
    return f'tensor("{dtype}", {sizes}, {"Math.random" if dtype.startswith("float") else "() => 0"})'


SAMPLES = 8
"""Of a batch of random numbers."""

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
