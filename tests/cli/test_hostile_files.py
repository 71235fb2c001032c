"""A file that is damaged, or made to harm, comes to a message that names what is wrong, in little time and memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnxgrad_cli.common.memory import GB, limited_memory
from onnxgrad_cli.errors import InternalError
from onnxgrad_cli.metadata import Roles
from onnxgrad_cli.verification.feeds import DescribedModel, random_feeds
from tests.cli_harness import MLP, PROGRAM, Result, Shell


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path, capsys)


def refused(shell: Shell, model: ModelProto | bytes, *words: str, command: str = "build", code: int = 1) -> Result:
    """Run a command on a model, which it must refuse with these words and leave nothing behind."""
    data = model if isinstance(model, bytes) else model.SerializeToString()
    (shell.folder / "m.onnx").write_bytes(data)
    result = shell(command, "m.onnx")
    assert result.code == code, result.err
    assert result.err.startswith("error: ") and "hint: " in result.err
    assert "internal" not in result.err and "Traceback" not in result.err
    for word in words:
        assert word in result.err
    assert {*shell.files()} <= {"m.onnx", "m.train.onnx.report.md"}  # a refusal is reported
    return result


def mlp() -> ModelProto:
    return onnx.parser.parse_model(MLP)


def in_function(body: str, call: str = "y = f.m(x)", attributes: str = "") -> onnx.ModelProto:
    return onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17, "f": 1]>
    g (float[2, 2] x) => (float[2, 2] y) {{ {call} }}
    <domain: "f", opset_import: ["": 17]> m {attributes} (a, b) => (c) {{ {body} }}""")


def test_axes_without_an_axis(shell: Shell) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> g (float[n, 4] x, float[n, 4] w) => (float y) <int64 axes = {1}> '
        "{ z = Mul(x, w) y = ReduceSum(z, axes) }"
    )
    onnx.save(model, shell.folder / "m.onnx")
    assert "internal" not in shell("inspect", "m.onnx", "--grad-of-input", "*").err


def doubling(count: int) -> ModelProto:
    """A model that calls a function that calls another one twice, and so on: 2^count nodes."""
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("d", 1)]
    model = onnx.parser.parse_model(MLP)
    for i in range(count):
        callee, domain = (f"f{i - 1}", "d") if i else ("Relu", "")
        calls = [helper.make_node(callee, [x], [y], domain=domain) for x, y in ("ab", "bc")]
        model.functions.append(helper.make_function("d", f"f{i}", ["a"], ["c"], calls, imports))
    model.opset_import.append(imports[1])
    model.graph.node[2].op_type, model.graph.node[2].domain = f"f{count - 1}", "d"
    return model


@pytest.mark.parametrize("command", ["build", "expand", "view"])
@pytest.mark.parametrize("count", [23, 63])
def test_functions_that_double(shell: Shell, count: int, command: str) -> None:
    words = (f"{2**count + 3:,} nodes", f"'d::f{count - 1}'", "onnx.inliner")
    refused(shell, doubling(count), *words, command=command)


def test_functions_that_double_a_few_times(shell: Shell) -> None:
    onnx.save(doubling(5), shell.folder / "m.onnx")
    assert shell("inspect", "m.onnx").code == 0


def test_few_bytes_become_no_more_nodes_than_are_built_in_seconds(shell: Shell) -> None:
    refused(shell, doubling(14), f"{2**14 + 3:,} nodes", "more than 10,000")


@pytest.mark.parametrize("where", ["input", "value_info", "initializer"])
def test_more_axes_than_arrays_have(shell: Shell, where: str) -> None:
    model, dims = mlp(), [1] * 200_000
    if where == "initializer":
        model.graph.initializer.append(helper.make_tensor("wide", TensorProto.FLOAT, dims, [1.0]))
    else:
        getattr(model.graph, where).append(helper.make_tensor_value_info("wide", TensorProto.FLOAT, dims))
    refused(shell, model, "'wide' has 200,000 axes")


def nested(depth: int) -> ModelProto:
    """A model with so many loops in one another."""
    text = "v2 = Relu(v1)"
    for i in range(depth):
        inner = f"c{i}b = Identity(c{i})  {text}"
        body = f"b{i} (int64 i{i}, bool c{i}, float[n, 4] v1) => (bool c{i}b, float[n, 4] v2) {{ {inner} }}"
        text = f"v2 = Loop(three, yes, v1) <body = {body}>"
    head = '<ir_version: 8, opset_import: ["": 17]> g (float[n, 4] x) => (float[n, 4] v2)'
    constants = "<float[4, 4] w = {1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1}, int64 three = {3}, bool yes = {1}>"
    return onnx.parser.parse_model(f"{head} {constants} {{ v1 = MatMul(x, w) {text} }}")


def test_loops_in_one_another(shell: Shell) -> None:
    refused(shell, nested(20), "(Loop) is nested in 6 loops", "fewer nested loops", code=3)


@pytest.mark.slow
def test_shapes_that_double(shell: Shell) -> None:
    """onnx follows the entries of a vector that Concat doubles forty times, were it not for a limit of memory."""
    model = mlp()
    model.graph.initializer.append(numpy_helper.from_array(np.ones(1, np.int64), "d0"))
    model.graph.node.extend(helper.make_node("Concat", [f"d{i}"] * 2, [f"d{i + 1}"], axis=0) for i in range(40))
    model.graph.node.append(helper.make_node("Expand", ["y", "d40"], ["z"]))
    model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, None))
    onnx.save(model, shell.folder / "m.onnx")
    assert shell("inspect", "m.onnx", "--no-infer-by-run").code == 0


@pytest.mark.skipif(sys.platform != "linux", reason="no other system tells a process how much it has")
def test_the_cost_of_shapes_that_fill_the_memory(shell: Shell) -> None:
    """With sizes for its symbols, shapes are inferred again: the entries of a vector of 2^31 are not followed."""
    model = mlp()
    model.graph.initializer.append(numpy_helper.from_array(np.array([2**31 - 1]), "many"))
    model.graph.node.append(helper.make_node("Shape", ["y"], ["shape"]))
    model.graph.node.append(helper.make_node("Gather", ["shape", "zero"], ["rows"]))
    model.graph.initializer.append(numpy_helper.from_array(np.array([0]), "zero"))
    model.graph.node.append(helper.make_node("Expand", ["rows", "many"], ["e"]))
    model.graph.node.append(helper.make_node("ReduceMax", ["e"], ["m"], keepdims=0))
    model.graph.node.append(helper.make_node("Cast", ["m"], ["f"], to=TensorProto.FLOAT))
    model.graph.node.append(helper.make_node("Mul", ["y", "f"], ["z"]))
    model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, None))
    onnx.save(model, shell.folder / "m.onnx")
    start = time.process_time()
    assert shell("inspect", "m.onnx", "--output", "z", "--no-infer-by-run").code == 0
    assert time.process_time() - start < 10


def test_a_split_into_more_parts_than_there_can_be(shell: Shell) -> None:
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
    g (float[9223372036854775807, 2] x) => (float[2] y) <int64 i = {0}, float[2] w = {1, 2}> {
        parts = SplitToSequence<keepdims = 0>(x) part = SequenceAt(parts, i) y = Mul(part, w)
    }""")
    onnx.save(model, shell.folder / "m.onnx")
    result = shell("inspect", "m.onnx", "--no-infer-by-run")
    assert result.code in (0, 3) and "internal" not in result.err


HUGE = {
    "a kernel that is not the weight's": (
        "y = Conv<kernel_shape = [300000000, 1]>(h, k)", 1,
        "its kernel_shape is [300000000, 1], but its weight has the kernel shape [3, 3]",
    ),
    "a window": (
        "y = LpPool<kernel_shape = [300000000, 1], pads = [299999992, 0, 299999992, 0]>(h)", 3,
        "its window of 300000000 x 1 is too large",
    ),
    "parts": ("y = Split<num_outputs = 1000000000>(h)", 1, "onnx needs more than 1 GB of memory to infer"),
    "a block": (
        "r = Reshape(h, columns) y = Col2Im(r, block, block)", 3, "its blocks of 20000 x 1 elements are too large"),
    "a scale": ("y = Resize<mode = \"linear\", antialias = 1>(h, , tiny)", 0, ""),
    "samples": ("y = RoiAlign<sampling_ratio = 2147483647>(h, rois, zero)", 3, "an axis of 2,147,483,647 elements"),
    "bins": ("y = RoiAlign<output_height = 2000000000>(h, rois, zero)", 3, "an axis of 2,000,000,000 elements"),
    "channels": ("c = Reshape(h, channels) y = LRN<size = 3>(c)", 3, "has 20000 channels"),
}  # fmt: skip
"""Nodes of which few bytes ask for billions of numbers; the exit code, and what is told."""


@pytest.mark.skipif(sys.platform != "linux", reason="no other system tells a process how much it has")
@pytest.mark.parametrize("what", HUGE)
def test_numbers_that_nothing_holds_are_not_written_out(shell: Shell, what: str) -> None:
    """What few bytes ask for is refused, or left to who runs it."""
    nodes, code, told = HUGE[what]
    size = "1, 20000, 1" if what in ("a block", "channels") else "1, 2, 8, 8"
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 18]>
        g (float[{size}] x) => (float y) <float[1] w = {{2}}, int64[3] columns = {{1, 20000, 1}},
        int64[2] block = {{20000, 1}}, int64[4] channels = {{1, 20000, 1, 1}}, int64[1] zero = {{0}},
        float[4] tiny = {{1.0, 1.0, 1e-30, 1.0}}, float[1, 4] rois = {{0, 0, 1, 1}}> {{ h = Mul(x, w) {nodes} }}""")
    model.graph.output[0].type.Clear()
    if "(h, k)" in nodes:
        model.graph.initializer.append(numpy_helper.from_array(np.ones((2, 2, 3, 3), np.float32), "k"))
    onnx.save(model, shell.folder / "m.onnx")
    with limited_memory(2 * GB):
        result = shell("build", "m.onnx", "--train", "w", "--no-verify")
    assert result.code == code and told in result.err, result.err


def test_a_gradient_of_no_text(shell: Shell) -> None:
    """Fuzzing has found it: what a Gradient differentiates is an attribute, which onnx lets be any bytes."""
    onnx.save(mlp(), "m.onnx")
    assert shell("build", "m.onnx", "--as-gradient-op", "-o", "g.onnx").code == 0
    model = onnx.load("g.onnx")
    (node,) = (node for node in model.graph.node if node.op_type == "Gradient")
    next(attribute for attribute in node.attribute if attribute.name == "y").s = b"\x10\xa7"
    onnx.save(model, "g.onnx")
    result = shell("expand", "g.onnx", "-o", "out.onnx")
    assert result.code == 2 and result.facts == ("unknown_name", "Gradient", "\u0010\\xa7")


# -- what others refuse is the file's fault, and what they do not refuse is ours -------------------------------------


def test_a_state_of_other_sizes_than_its_weight(shell: Shell) -> None:
    """onnx compares no sizes of optimizers, and arithmetic would broadcast the first."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17, "ai.onnx.preview.training": 1]>
    g (float r, int64 t, float[2] x, float[1] g, float[2] h) => (float[2] y) <float[2] w = {1, 2}> {
        a = Mul(x, w) y, z = ai.onnx.preview.training.Momentum<alpha: float = 0.5, beta: float = 0.5,
            mode: string = "standard", norm_coefficient: float = 0.0>(r, t, a, g, h)
    }""")
    refused(shell, model, "'g' has the shape [1], but its tensor 'a' has [2]", code=3)
    model.graph.input[3].type.tensor_type.shape.dim[0].dim_value = 3
    refused(shell, model, "'g' has the shape [3], but its tensor 'a' has [2]", code=3)


def test_an_output_that_is_named_twice_and_has_no_type(shell: Shell) -> None:
    """What a run has told of its rank is kept to by nodes, which need a type."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18, "acme": 1]>
        g (float[batch, 3] x) => (float[batch, 1] y) <float[3, 1] w = {1, 2, 3}> { y = acme.Gemm(x, w) }""")
    other = model.graph.output.add(name="y").type.tensor_type
    other.elem_type = 0
    other.shape.dim.add(dim_value=3)
    other.shape.dim.add()
    onnx.save(model, "m.onnx")
    result = shell("build", "m.onnx", "--loss", "mse", "--dim", "batch=2")
    assert result.code == 3 and result.facts == ("refused", "Gemm_y")


def test_an_output_that_is_named_twice(shell: Shell) -> None:
    model = mlp()
    model.graph.output.append(model.graph.output[0])
    onnx.save(model, shell.folder / "m.onnx")
    result = shell("derive", "m.onnx", "--kind", "jacobian", "-o", "j.onnx")
    assert result.code == 0, result.err


def test_what_others_refuse_is_a_fault_of_the_file(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fails on a model that onnxruntime does not load."""

    def fails(*_: object) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr("onnxgrad_cli.passes.prepare.infer_and_lower.infer_types", fails)
    model = mlp()
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 5
    refused(shell, model, "the model is not a valid ONNX model", "node name: h", "Incompatible dimensions")
    with (shell.folder / "m.onnx").open(encoding="latin-1") as stdin:  # which can be read but once
        monkeypatch.setattr("sys.stdin", stdin)
        result = shell("inspect", "-")
    assert result.code == 1 and result.facts[1:4] == ("ShapeInferenceError", "op_type", "MatMul")


def test_what_others_take_is_a_fault_of_onnxgrad(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise InternalError("internal: unforeseen")

    monkeypatch.setattr("onnxgrad_cli.passes.prepare.infer_and_lower.infer_types", fails)
    onnx.save(mlp(), shell.folder / "m.onnx")
    for command in ("build", "inspect"):
        result = shell(command, "m.onnx")
        assert result.code == 1 and result.facts == ("internal",) and "unforeseen" in result.err


def test_the_log_of_onnxruntime_stays_out_of_the_terminal(tmp_path: Path) -> None:
    """Of a Range to 2^63 its allocator writes a coloured line past the command."""
    head = '<ir_version: 8, opset_import: ["": 17]> g (float[3] x) => (float[n] y)'
    text = f"{head} <int64 a = {{0}}, int64 b = {{{2**63 - 1}}}, int64 c = {{1}}>"
    text += " { r = Range(a, b, c) s = Cast<to=1>(r) t = ReduceSum<keepdims=0>(s) y = Add(x, t) }"
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    result = on_its_own(tmp_path, "build", "m.onnx", "--grad-of-input", "*", "-o", "out.onnx")
    assert "does not run on random data" in result.stdout
    assert "onnxruntime:" not in result.stderr and "\x1b" not in result.stderr


# -- what ends the process -------------------------------------------------------------------------------------------


def test_a_number_that_may_be_a_step_is_not_drawn_as_zero() -> None:
    """Of a step of 0 in STFT onnxruntime divides by it, and the process ends."""
    inputs = "float[1, 128, 1] x, int64 step, int64 length, bool c, int64[40] mask"
    head = '<ir_version: 8, opset_import: ["": 17]>'
    model = onnx.parser.parse_model(f"{head} g ({inputs}) => (float[1, n, m, 2] y) {{ y = STFT(x, step, , length) }}")
    roles = Roles("", (), "mean", {value.name: "model input" for value in model.graph.input}, {})
    drawn = [random_feeds(DescribedModel(model, roles), np.random.default_rng(seed), {}) for seed in range(20)]
    assert all(feeds["step"] == feeds["length"] == 1 for feeds in drawn)
    assert {bool(feeds["c"]) for feeds in drawn} == {False, True} and all(0 in feeds["mask"] for feeds in drawn)


SUPERVISED = pytest.mark.skipif(not hasattr(signal, "sigwaitinfo"), reason="commands have no supervisor here")


def on_its_own(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    return subprocess.run(
        [*PROGRAM, *arguments], cwd=folder, capture_output=True, text=True, check=False, env={**os.environ, **PATHS}
    )


PATHS = {"PYTHONPATH": os.pathsep.join(sys.path), "NO_COLOR": "1"}


@SUPERVISED
def test_an_assertion_in_the_inference_of_shapes(tmp_path: Path) -> None:
    text = '<ir_version: 8, opset_import: ["": 17]> g (float[2, 6] x) => (float[2, 3] a) { a, b = Split(x, s) }'
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(numpy_helper.from_array(np.array([3, 3, 3, 3]), "s"))
    onnx.save(model, tmp_path / "m.onnx")
    result = on_its_own(tmp_path, "inspect", "m.onnx", "--grad-of-input", "*", "--json")
    assert result.returncode in (0, 1, 3) and "Traceback" not in result.stderr
