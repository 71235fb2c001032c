"""A file that is damaged, or made to harm, comes to a message that names what is wrong, in little time and memory."""

from __future__ import annotations

import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnxgrad_cli import build
from onnxgrad_cli.common.memory import GB, limited_memory
from onnxgrad_cli.errors import InternalError, OnnxgradError
from onnxgrad_cli.execution import limits
from onnxgrad_cli.files import check_structure, read_model
from onnxgrad_cli.ir.einsum import is_equation
from onnxgrad_cli.jobs.build import run_build
from onnxgrad_cli.jobs.inspect import inspect
from onnxgrad_cli.jobs.view import run_view
from onnxgrad_cli.metadata import Roles, describe
from onnxgrad_cli.verification import feeds
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


LIES = [
    ({"dims": [4, 2**40], "raw_data": bytes(48)}, ("[4, 1099511627776]", "stores 48")),
    ({"dims": [2**32, 2**32], "raw_data": b""}, ("[4294967296, 4294967296]",)),
    ({"dims": [2**40, 0, 2**40], "raw_data": b""}, ("1099511627776",)),
    ({"dims": [4, -3], "raw_data": bytes(48)}, ("[4, -3]",)),
    ({"dims": [400, 3], "raw_data": bytes(4796)}, ("4,800 bytes", "stores 4,796")),
    ({"dims": [4, 3], "float_data": [0.0] * 13}, ("12 numbers", "stores 13")),
    ({"dims": [4, 3], "raw_data": bytes(48), "data_type": 77}, ("unknown type 77",)),
    ({"dims": [4, 3], "raw_data": bytes(48), "segment": TensorProto.Segment(begin=0, end=4)}, ("a segment",)),
    ({"dims": [2**40], "string_data": [b"a"], "data_type": TensorProto.STRING}, ("1,099,511,627,776 strings",)),
    ({"dims": [7], "raw_data": bytes(5), "data_type": TensorProto.INT4}, ("4 bytes", "stores 5")),
]


@pytest.mark.parametrize(("fields", "words"), LIES)
@pytest.mark.parametrize("inside", [False, True])
def test_a_tensor_stores_what_it_declares(
    shell: Shell, fields: dict[str, object], words: tuple[str, ...], inside: bool
) -> None:
    model = mlp()
    tensor = TensorProto(**{"name": "lie", "data_type": TensorProto.FLOAT, **fields})
    if inside:
        model.graph.node.append(helper.make_node("Constant", [], ["c"], value=tensor))
    else:
        model.graph.initializer.append(tensor)
    refused(shell, model, "tensor 'lie'", *words)


@pytest.mark.parametrize("dtype", [d for d in TensorProto.DataType.values() if d])
@pytest.mark.parametrize("raw", [False, True])
def test_tensors_of_every_type_store_what_they_declare(dtype: int, raw: bool) -> None:
    model = mlp()
    values = [b"a"] * 5 if dtype == TensorProto.STRING else [0, 1, 1, 0, 1]
    tensor = helper.make_tensor("t", dtype, [5], values)
    if raw and dtype != TensorProto.STRING:
        tensor = numpy_helper.from_array(numpy_helper.to_array(tensor), "t")
        assert tensor.HasField("raw_data")
    model.graph.initializer.append(tensor)
    assert read_model(model.SerializeToString())[0].graph.initializer[-1] == tensor


@pytest.mark.parametrize("command", ["build", "view"])
def test_strings_that_are_no_text(shell: Shell, command: str) -> None:
    """numpy_helper decodes them, wherever they are read."""
    text = '<ir_version: 10, opset_import: ["": 21]> g (string[2] x) => (bool[2] y) { y = Equal(x, s) }'
    model = onnx.parser.parse_model(text)
    model.graph.initializer.add(name="s", data_type=TensorProto.STRING, dims=[2], string_data=[b"\xff", b"a"])
    refused(shell, model, "tensor 's' has a string that is not UTF-8", command=command)


def test_an_attribute_of_a_function_outside_of_one(shell: Shell) -> None:
    model = mlp()
    model.graph.node[2].attribute.add(name="alpha", type=onnx.AttributeProto.FLOAT, ref_attr_name="slope")
    refused(shell, model, "'alpha'", "'s' (Sigmoid)", "'slope'")


def test_an_absent_input_among_many(shell: Shell) -> None:
    model = mlp()
    model.graph.node[1].op_type = "Sum"
    model.graph.node[1].input.append("")
    refused(shell, model, f"'k' (Sum) has no input {len(model.graph.node[1].input) - 1}")


@pytest.mark.parametrize(
    "node",
    ["y = LayerNormalization(x, k, '')", "y = DFT(x, '', '')", "y = Clip(x, '', '')"],
    ids=["bias", "axis", "max"],
)
def test_an_absent_input_at_the_end(shell: Shell, node: str) -> None:
    """It means what no input means there; onnxruntime ends the process on the first two."""
    text = f"""<ir_version: 8, opset_import: ["": 20]>
    g (float[1, 4, 2] x) => (float[1, 4, 2] y) <float[2] k = {{1, 2}}> {{ {node.replace("'", '"')} }}"""
    onnx.save(onnx.parser.parse_model(text), "m.onnx")
    result = shell("build", "m.onnx", "--loss", "mse", "--grad-of-input", "x", "-o", "o.onnx")
    assert result.code == 0 and "proved" in result.err + result.out


@pytest.mark.parametrize(
    ("node", "told"),
    [
        (
            "z, y = Scan <num_scan_inputs = 1, body: graph = b (float s, float v) => () { o = Add(s, v) }> (k, x)",
            "needs 2",
        ),
        ("y = Loop <body: graph = b (int64 i, bool t, float[2] s) => () { o = Relu(s) }> (n, c, x)", "needs 2"),
        ("y = If <then_branch: graph = b () => () {}, else_branch: graph = e () => () {}> (c)", "needs 1"),
    ],
)
def test_a_body_that_hands_out_nothing(shell: Shell, node: str, told: str) -> None:
    """onnx's checker lets it pass, and onnxruntime opens the first."""
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17]>
    g (float[2] x) => (float[2] y) <float k = {{0}}, bool c = {{1}}, int64 n = {{3}}> {{ {node} }}""")
    refused(shell, model, "has a body with 0 outputs", told)


def in_function(body: str, call: str = "y = f.m(x)", attributes: str = "") -> onnx.ModelProto:
    return onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17, "f": 1]>
    g (float[2, 2] x) => (float[2, 2] y) {{ {call} }}
    <domain: "f", opset_import: ["": 17]> m {attributes} (a, b) => (c) {{ {body} }}""")


def test_an_absent_input_among_many_in_a_function(shell: Shell) -> None:
    """onnxruntime ends the process of the first, and of the second too, which lacks it by its call alone."""
    refused(shell, in_function('c = Sum(a, "")'), "'c' (Sum) has no input 1")
    refused(shell, in_function("c = Sum(a, b)"), "(Sum) has no input 1")


def normalized(op_type: str, opset: int, call: str = "", attributes: str = "", given: str = "") -> onnx.ModelProto:
    return onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": {opset}, "f": 1]>
    g (float[2, 2] x) => (float[2, 2] y) <float[2] s = {{1, 2}}> {{ y = f.m{call}(x, s) }}
    <domain: "f", opset_import: ["": {opset}]> m {attributes} (a, b) => (c) {{ c = {op_type} {given} (a, b) }}""")


@pytest.mark.parametrize(("op_type", "opset"), [("LayerNormalization", 14), ("SimplifiedLayerNormalization", 17)])
def test_a_normalization_of_onnxruntime_in_a_function(shell: Shell, op_type: str, opset: int) -> None:
    """Without a stash_type onnxruntime ends the process there; with one it reads the model, as it does outside."""
    told = (f"'c' ({op_type}) in function 'm'", "stash_type")
    referred = {"attributes": "<t>", "given": "<stash_type: int = @t>"}
    refused(shell, normalized(op_type, opset, given="<epsilon = 0.1>"), *told)
    refused(shell, normalized(op_type, opset, **referred), *told)
    for model in (
        normalized(op_type, opset, "<t = 1>", **referred),
        normalized(op_type, opset, given="<stash_type = 1>"),
    ):
        assert onnxruntime.InferenceSession(model.SerializeToString()).get_outputs()[0].name == "y"
        check_structure(model)


@pytest.mark.parametrize("equation", ["[a-z", "a.b", "...a..", "a...b...", "ab->a->b", "a1", "ab;ba", "a\xe9"])
def test_an_equation_that_is_none(shell: Shell, equation: str) -> None:
    """For the first four onnx's inference of shapes never ends, and onnxruntime's, which is the same."""
    model = in_function('c = Einsum<equation = "E">(a)')
    model.functions[0].node[0].attribute[0].s = equation.encode()
    refused(shell, model, "'c' (Einsum) has the equation", "which is not valid")
    model = in_function("c = Einsum<equation: string = @e>(a)", 'y = f.m<e = "E">(x)', "<e>")
    model.graph.node[0].attribute[0].s = equation.encode()
    refused(shell, model, "(Einsum) has the equation", "which is not valid")


@pytest.mark.parametrize("equation", ["ij->ji", " i j -> j i ", "...", "...i->i...", "i...j", "ii", "ij->"])
def test_an_equation(equation: str) -> None:
    """What is one is so for numpy too."""
    np.einsum(equation, np.ones((2, 2)))
    assert is_equation(equation) and is_equation(f"{equation.partition('->')[0]},ab")


def test_axes_without_an_axis(shell: Shell) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> g (float[n, 4] x, float[n, 4] w) => (float y) <int64 axes = {1}> '
        "{ z = Mul(x, w) y = ReduceSum(z, axes) }"
    )
    onnx.save(model, shell.folder / "m.onnx")
    assert "internal" not in shell("inspect", "m.onnx", "--grad-of-input", "*").err


@pytest.mark.parametrize("opset", [0, -3, 2**40])
def test_an_opset_that_never_was(shell: Shell, opset: int) -> None:
    model = mlp()
    model.opset_import[0].version = opset
    refused(shell, model, f"version {opset} of 'ai.onnx'")


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="there is no /dev/zero")
def test_a_device_without_an_end(shell: Shell) -> None:
    result = shell("inspect", "/dev/zero")
    assert result.code == 1 and "does not begin like an ONNX model" in result.err


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names")
@pytest.mark.parametrize(
    "command",
    [
        ("inspect",), ("build", "--label", "t", "-o", "t.onnx"), ("derive", "-o", "d.onnx"), ("view", "-o", "v.html"),
        ("build", "--label", "t", "--artifacts", "folder"), ("expand", "-o", "e.onnx"),
        ("train", "--data", "d.npz", "--epochs", "1", "-o", "m.onnx"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_pipe_is_read_like_a_file(shell: Shell, command: tuple[str, ...]) -> None:
    os.mkfifo(shell.folder / "pipe")
    np.savez(shell.folder / "d.npz", x=np.ones((4, 4), np.float32), label=np.ones((4, 2), np.float32))
    data = mlp().SerializeToString()
    writer = threading.Thread(target=(shell.folder / "pipe").write_bytes, args=(data,))
    writer.start()
    result = shell(*command, "pipe")
    writer.join()
    assert result.code == 0, result.err


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names")
def test_what_fails_with_a_model_from_a_pipe_waits_for_no_other(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(shell.folder / "pipe")
    writer = threading.Thread(target=(shell.folder / "pipe").write_bytes, args=(mlp().SerializeToString(),))
    writer.start()

    def fails(*arguments: object) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr("onnxgrad_cli.jobs.derive.settle_sizes", fails)
    result = shell("derive", "pipe", "-o", "d.onnx")
    writer.join()
    assert result.code == 1 and "internal: ZeroDivisionError: ours" in result.err


def test_a_file_that_is_longer_than_a_message_can_be(shell: Shell) -> None:
    with (shell.folder / "m.onnx").open("wb") as file:
        file.write(mlp().SerializeToString())
        file.truncate(2**31)  # of which the disk holds nothing
    result = shell("inspect", "m.onnx")
    assert result.code == 1 and "larger than 2 GB" in result.err and "external data" in result.err


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
    refused(shell, doubling(14), f"{2**14 + 3:,} nodes", "at most 10,000")


@pytest.mark.parametrize("where", ["input", "value_info", "initializer"])
def test_more_axes_than_arrays_have(shell: Shell, where: str) -> None:
    model, dims = mlp(), [1] * 200_000
    if where == "initializer":
        model.graph.initializer.append(helper.make_tensor("wide", TensorProto.FLOAT, dims, [1.0]))
    else:
        getattr(model.graph, where).append(helper.make_tensor_value_info("wide", TensorProto.FLOAT, dims))
    refused(shell, model, "'wide' has 200,000 axes")


@pytest.mark.parametrize("job", [build, inspect, run_view])
def test_a_model_in_memory_stores_what_it_declares(job: Callable[[ModelProto], object]) -> None:
    model = mlp()
    model.graph.initializer.append(TensorProto(name="lie", data_type=TensorProto.FLOAT, dims=[2**40]))
    with pytest.raises(OnnxgradError, match="'lie' declares the sizes"):
        job(model)


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
    "samples": ("y = RoiAlign<sampling_ratio = 2147483647>(h, rois, zero)", 3, "2,147,483,647 places along an axis"),
    "bins": ("y = RoiAlign<output_height = 2000000000>(h, rois, zero)", 3, "2,000,000,000 places along an axis"),
    "channels": ("c = Reshape(h, channels) y = LRN<size = 3>(c)", 3, "its number of channels, 20,000, is too large"),
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


def endless() -> ModelProto:
    """A model with a loop of 2^62 iterations."""
    model = nested(1)
    model.graph.initializer[1].CopyFrom(numpy_helper.from_array(np.array(2**62), "three"))
    return model


def unforeseen() -> ModelProto:
    """A model with such a loop, whose iterations are known only when it runs."""
    model = endless()
    loop = next(node for node in model.graph.node if node.op_type == "Loop")
    made = onnx.parser.parse_graph("""g (float[n, 4] x) => (int64[1, 1] rounds)
        <float zero = {0}> { least = ReduceMin(x) none = Mul(least, zero) whole = Cast<to = 7>(none)
        rounds = Add(three, whole) }""")
    model.graph.initializer.extend(made.initializer)
    loop.input[0] = "rounds"
    nodes = [*made.node, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


def expanding() -> ModelProto:
    """A model of which a run takes 8 GB."""
    model = mlp()
    model.graph.output[0].name = "z"
    model.graph.initializer.append(numpy_helper.from_array(np.array([2**30, 1, 1]), "large"))
    model.graph.node.append(helper.make_node("Expand", ["y", "large"], ["e"]))
    model.graph.node.append(helper.make_node("ReduceMean", ["e"], ["z"], axes=[0], keepdims=0))
    return model


@pytest.mark.skipif(sys.platform != "linux", reason="no other system tells a process how much it has")
@pytest.mark.parametrize(
    ("model", "what"), [(endless, "billion operations"), (unforeseen, "0.2 s"), (expanding, "4 GB of memory")]
)
def test_what_no_machine_can_run_is_not_proved(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, model: Callable[[], ModelProto], what: str
) -> None:
    monkeypatch.setattr(limits, "SECONDS", 0.2)
    onnx.save(model(), shell.folder / "m.onnx")
    result = shell("build", "m.onnx", "--json")
    assert result.code == 0, result.err
    proof = result.json["proof"]
    assert proof["verdict"] == "not_proved" and what in proof["why"]
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    assert soft == resource.RLIM_INFINITY


def test_the_runs_of_a_job_have_one_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes are tried before the passes begin, and it is proved after them: a run of each would take all its time."""
    spent = []
    before = limits.Stopping.__call__
    monkeypatch.setattr(limits.Stopping, "__call__", lambda self: (spent.append(self), before(self)))
    monkeypatch.setattr(limits, "SECONDS", 0.3)
    model = endless()
    model.graph.input.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, ["n", 4]))  # n is on two axes
    model.graph.node.append(helper.make_node("Add", ["v2", "z"], ["sum"]))
    model.graph.output[0].name = "sum"
    onnx.save(model, tmp_path / "m.onnx")
    report = run_build(tmp_path / "m.onnx", no_report=True)
    assert len(spent) == 1 and "0.3 s" in report.verdict


def test_runs_take_their_time_from_one_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(names: None, feeds: dict[str, float]) -> list[float]:
        end = time.process_time() + feeds["seconds"]
        while time.process_time() < end:
            pass
        return []

    monkeypatch.setattr(limits, "SECONDS", 0.4)
    with limits.shared_budget():
        with limits.within_budget():
            limits.run_limited(run, {"seconds": 0.2})
        limits.run_limited(run, {"seconds": 0.3})  # asked for: it takes nothing from the others
        with limits.within_budget(), pytest.raises(limits.OverLimit, match=r"0\.4 s"):
            limits.run_limited(run, {"seconds": 0.9})
        with limits.within_budget(), pytest.raises(limits.OverLimit):
            limits.run_limited(run, {"seconds": 0.0})
    with limits.within_budget():
        limits.run_limited(run, {"seconds": 0.0})


def test_runs_at_the_same_time_have_one_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2, timeout=30)

    def run(seconds: float) -> float:
        def work(names: None, feeds: dict[str, float]) -> list[float]:
            both.wait()  # for the other
            end = time.process_time() + seconds
            while time.process_time() < end:
                pass
            return [seconds]

        return limits.run_limited(work, {})[0]

    monkeypatch.setattr(limits, "SECONDS", 0.4)
    with limits.within_budget():
        assert limits.at_once(run, [0.0, 0.1]) == [0.0, 0.1]
        with pytest.raises(limits.OverLimit, match=r"0\.4 s"):
            limits.at_once(run, [0.0, 5.0])
        with pytest.raises(limits.OverLimit):
            limits.at_once(run, [0.0, 0.0])
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    assert soft == resource.RLIM_INFINITY


def test_runs_of_larger_models_may_take_longer() -> None:
    patience = limits.RunBudget()
    larger = ((0, 0, 6), (4 * 10**6, 0, 8), (10**6, 0, 8), (10**6, 200, 11.5), (0, 90, 11.5), (10**12, 0, 60))
    for size, nodes, seconds in larger:
        patience.allow(size, nodes)
        assert patience.left == seconds and patience.each == 6
    patience.allow(10**12, 0, 10**9)
    assert patience.left == 90 and patience.each == 36
    patience.allow(0, 0, 10**15)
    assert patience.left == patience.each == 126


@pytest.mark.parametrize(("size", "verdict"), [(256, "proved"), (10**6, "not_proved")])
def test_what_is_proved_unasked_is_decided_by_the_work_in_it(shell: Shell, size: int, verdict: str) -> None:
    """The file is small, and each of its products takes 10^13 operations at the larger size."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]> g (float[n, 4] x) => (float[n, 4] y)
        <float[4, 4] w = {1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1}>
        { h = MatMul(x, w) t = Transpose(h) square = MatMul(h, t) y = MatMul(square, h) }""")
    onnx.save(model, shell.folder / "m.onnx")
    result = shell("build", "m.onnx", "--dim", f"n={size}", "--json")
    assert result.code == 0, result.err
    proof = result.json["proof"]
    assert proof["verdict"] == verdict
    assert ("billion operations per run" in proof["why"]) == (verdict != "proved")


def test_a_gradient_of_no_text(shell: Shell) -> None:
    """Fuzzing has found it: what a Gradient differentiates is an attribute, which onnx lets be any bytes."""
    onnx.save(mlp(), "m.onnx")
    assert shell("build", "m.onnx", "--as-gradient-op", "-o", "g.onnx").code == 0
    model = onnx.load("g.onnx")
    (node,) = (node for node in model.graph.node if node.op_type == "Gradient")
    next(attribute for attribute in node.attribute if attribute.name == "y").s = b"\x10\xa7"
    onnx.save(model, "g.onnx")
    result = shell("expand", "g.onnx", "-o", "out.onnx")
    assert result.code == 2 and "has no such tensor" in result.err


# -- what others refuse is the file's fault, and what they do not refuse is ours -------------------------------------


def test_a_name_that_is_not_text(shell: Shell) -> None:
    refused(shell, mlp().SerializeToString().replace(b"w1", b"w\xff"), "not UTF-8", "w\\xff")


def test_a_name_that_is_not_text_where_nothing_is_to_be_done(shell: Shell) -> None:
    refused(shell, mlp().SerializeToString().replace(b"w1", b"w\xff"), "not UTF-8", command="expand")


def test_a_domain_at_version_0(shell: Shell) -> None:
    """onnx's checker knows no operator of it, and lets every use of one pass."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17, "ai.onnx.ml": 3]>
    g (float[n, 2] x) => (float[n, 2] y) <float[2] w = {1, 2}> { s = ai.onnx.ml.Normalizer(x) y = Mul(s, w) }""")
    model.opset_import[1].version = 0
    refused(shell, model, "it imports version 0 of 'ai.onnx.ml'")
    model.opset_import[0].version = 0
    refused(shell, model, "it imports version 0 of 'ai.onnx'")


def test_tensors_that_belong_to_no_weight(shell: Shell) -> None:
    """Adagrad reads each weight with its gradient and its state: onnx says of them only that they are many."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17, "ai.onnx.preview.training": 1]>
    g (float r, int64 t, float[2] x, float[2] g, float[2] h) => (float[2] y) <float[2] w = {1, 2}> {
        a = Mul(x, w) y, z = ai.onnx.preview.training.Adagrad(r, t, a, g, h, x)
    }""")
    refused(shell, model, "4 tensors, but needs 3 for each weight", code=3)


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
    assert result.code == 3 and "produces no floats" in result.err


def test_a_draw_of_data_is_of_the_time_of_runs() -> None:
    with limits.shared_budget(), limits.within_budget() as patience:
        assert patience is not None
        left = patience.left
        with limits.counted():
            sum(i * i for i in range(10**6))
        assert patience.left < left - 0.01
        patience.spent = "6 s"
        with pytest.raises(limits.OverLimit), limits.counted():
            pass
    with limits.counted():
        pass


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process what it has")
def test_a_draw_of_data_is_of_the_memory_of_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a label that is expanded to gigabytes: 8 here, of a limit of 4."""
    model = build(mlp()).model
    described, rng = DescribedModel(model, describe(model)), np.random.default_rng(0)
    monkeypatch.setattr(feeds, "free_memory", lambda: math.inf)
    with limits.shared_budget(), limits.within_budget(), pytest.raises(limits.OverLimit, match="4 GB of memory"):
        random_feeds(described, rng, {"batch": 2**28})
    monkeypatch.setattr(feeds, "free_memory", lambda: 100.0)  # where it was asked for there is no other limit
    with pytest.raises(MemoryError, match="do not fit"):
        random_feeds(described, rng, {"batch": 2**6})


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
    assert result.code == 1 and "not a valid ONNX model" in result.err


def test_what_others_take_is_a_fault_of_onnxgrad(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise InternalError("internal: unforeseen")

    monkeypatch.setattr("onnxgrad_cli.passes.prepare.infer_and_lower.infer_types", fails)
    onnx.save(mlp(), shell.folder / "m.onnx")
    for command in ("build", "inspect"):
        result = shell(command, "m.onnx")
        assert result.code == 1 and "internal: unforeseen" in result.err and "bug in onnxgrad" in result.err


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

DIES = """
import os, signal, sys
from onnxgrad_cli import __main__, cli
cli.run = lambda arguments: os.kill(os.getpid(), int(arguments[0])) or signal.pause()
sys.argv[1:] = ["NUMBER"]
__main__.main()
"""


@SUPERVISED
def test_an_assertion_in_the_inference_of_shapes(tmp_path: Path) -> None:
    text = '<ir_version: 8, opset_import: ["": 17]> g (float[2, 6] x) => (float[2, 3] a) { a, b = Split(x, s) }'
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(numpy_helper.from_array(np.array([3, 3, 3, 3]), "s"))
    onnx.save(model, tmp_path / "m.onnx")
    result = on_its_own(tmp_path, "inspect", "m.onnx", "--grad-of-input", "*", "--json")
    assert result.returncode in (0, 1, 3) and "Traceback" not in result.stderr


@SUPERVISED
def test_the_want_of_memory_is_told(tmp_path: Path) -> None:
    """The C library ends a process by itself where an error needs memory that is not there."""
    program = DIES.replace("os.kill(os.getpid(), int(arguments[0]))", "os._exit(127)")
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, env={**os.environ, **PATHS}
    )
    assert result.returncode == 1 and "no memory left" in result.stderr and "hint: " in result.stderr


@SUPERVISED
@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGKILL])
def test_the_death_of_a_command_is_told(tmp_path: Path, number: signal.Signals) -> None:
    program = DIES.replace("NUMBER", str(int(number)))
    environment = {**os.environ, **PATHS}
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False, env=environment
    )
    assert result.returncode == 1 and number.name in result.stderr and "hint: " in result.stderr


@SUPERVISED
def test_a_run_that_never_ends_is_ended_by_a_second_interrupt(tmp_path: Path) -> None:
    """Native code does not look whether Python was interrupted."""
    program = """
import itertools, os
from onnxgrad_cli import __main__, cli
from onnxgrad_cli.common import supervision
supervision.GRACE = 0.2
begun = map(os.write, [1], [b"."])  # no code of Python runs any more, which a signal could come before
cli.run = lambda arguments: sum(itertools.chain(begun, itertools.repeat(0)))
__main__.main()
"""
    environment = {**os.environ, **PATHS}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment) as running:
        assert running.stdout is not None and running.stdout.read(1) == b"."
        running.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            running.wait(0.4)
        running.send_signal(signal.SIGINT)
        assert running.wait(20) == 130


@SUPERVISED
def test_a_signal_that_ends_a_command_ends_its_parent(tmp_path: Path) -> None:
    program = DIES.replace("NUMBER", str(int(signal.SIGUSR1)))
    environment = {**os.environ, **PATHS}
    result = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, check=False)
    assert result.returncode == -signal.SIGUSR1


@SUPERVISED
def test_a_command_ends_with_its_parent(tmp_path: Path) -> None:
    """Killed at once, the parent can't hand on anything: the system ends the child, which waits for stdin here."""
    with subprocess.Popen([*PROGRAM, "inspect", "-"], stdin=subprocess.PIPE, env={**os.environ, **PATHS}) as parent:
        assert parent.stdin is not None
        parent.stdin.write(b"\x08" * (1 << 17))  # more than a pipe holds: now it reads
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        parent.kill()
        parent.wait()
        assert len(children) == 1
        for _ in range(100):
            state = Path(f"/proc/{children[0]}/stat")
            if not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return
            time.sleep(0.05)
        pytest.fail("the child goes on")
