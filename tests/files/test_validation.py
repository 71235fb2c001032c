"""Invalid models are refused by every command alike: one message with the node or tensor, exit code 1, no output."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx.parser
import pytest
from onnx import AttributeProto, ModelProto, SparseTensorProto, TensorProto, TypeProto, helper, numpy_helper

from onnxgrad_cli import build
from onnxgrad_cli.errors import OnnxgradError
from tests.cli_harness import Result, Shell

Change = Callable[[ModelProto], object]

MLP = """<ir_version: 8, opset_import: ["": 17]> mlp (float[batch, 4] x) => (float[batch, 2] y)
<float[4, 3] w1 = {1, -2, 3, 4, 5, -6, 7, 8, 9, -1, 2, 3}, float[3] b1 = {1, 2, 3}, float[3, 2] w2 = {1, 2, 3, 4, 5, 6}>
{ [first] h = MatMul(x, w1) [second] k = Add(h, b1) [third] s = Sigmoid(k) [fourth] y = MatMul(s, w2) }"""


def mlp(change: Change = bool) -> ModelProto:
    model = onnx.parser.parse_model(MLP)
    change(model)
    return model


def of(
    nodes: str, shape: str = "n, 4", weights: str = "float[4] w = {1, 2, 3, 4}", opset: int = 17, change: Change = bool
) -> ModelProto:
    """A model of x with the given shape, whose z = x * k is trained."""
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": {opset}]> g (float[{shape}] x) => (float y)
        <{weights}, float[1, 1, 1] k = {{2}}> {{ z = Mul(x, k) {nodes} }}""")
    model.graph.output[0].ClearField("type")
    change(model)
    return model


def field(path: str, **values: object) -> Change:
    """Set fields of a message in the graph, such as `node[0]`."""

    def change(model: ModelProto) -> None:
        name, _, at = path.rstrip("]").partition("[")
        message = getattr(model.graph, name)[int(at)]
        for key, value in values.items():
            message.ClearField(key)
            if isinstance(value, list):
                getattr(message, key).extend(value)
            elif isinstance(value, TypeProto):
                getattr(message, key).CopyFrom(value)
            else:
                setattr(message, key, value)

    return change


def kind(dtype: int, *shape: int | str) -> TypeProto:
    return helper.make_tensor_type_proto(dtype, shape)


def attribute(name: str, **values: object) -> Change:
    """Replace the attributes of the last node by one, which may be broken."""

    def change(model: ModelProto) -> None:
        node = model.graph.node[-1]
        del node.attribute[:]
        node.attribute.append(AttributeProto(name=name, **values))

    return change


def weight(array: np.ndarray) -> Change:
    return lambda model: model.graph.initializer.append(numpy_helper.from_array(array, "w1"))


def external(**entries: str) -> Change:
    """Store the first weight, of 48 bytes, outside; w.bin beside the model has 48 bytes."""

    def change(model: ModelProto) -> None:
        tensor = model.graph.initializer[0]
        tensor.ClearField("float_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in entries.items():
            tensor.external_data.add(key=key, value=value)

    return change


def sparse(indices: list[int], values: tuple[float, ...] = (1, 2), rows: int = 3, name: str = "w2") -> Change:
    def change(model: ModelProto) -> None:
        if name == "w2":
            model.graph.initializer.pop()
        model.graph.sparse_initializer.append(
            SparseTensorProto(
                values=TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[2], float_data=values),
                indices=TensorProto(name="at", data_type=TensorProto.INT64, dims=[2], int64_data=indices),
                dims=[rows, 2],
            )
        )

    return change


def branches(then: str = "a = Relu(z)", other: str = "b = Tanh(z)", head: str = "() => (float[n] a)") -> str:
    return f"""t = ReduceMax <keepdims = 0> (z) c = Cast <to = 9> (t)
        y = If <then_branch: graph = t {head} {{ {then} }},
            else_branch: graph = e () => (float[n] b) {{ {other} }}> (c)"""


def loop(outputs: str = "bool u, float[n] v", passed: str = "m, c, z", more: str = "") -> ModelProto:
    return of(
        f"""y = Loop <body: graph = b (int64 i, bool t, float[n] s) => ({outputs}) {{
            u = Identity(t) v = Mul(z, w) {more} }}> ({passed})""",
        weights="float[4] w = {1, 2, 3, 4}, int64 m = {3}, bool c = {1}",
    )


def scan(attributes: str, inputs: str = "float[4] s, float[4] v") -> ModelProto:
    return of(
        f"r, y = Scan <{attributes}, body: graph = b ({inputs}) => (float[4] p, float[4] q) "
        "{ p = Mul(w, w) q = Relu(p) }> (w, x)"
    )


def function(call: str = "x, w", body: str = "c = Mul(a, b)", change: Change = bool) -> ModelProto:
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17, "f": 1]>
        g (float[n, 4] x) => (float[n, 4] y) <float[4] w = {{1, 2, 3, 4}}> {{ y = f.m({call}) }}
        <domain: "f", opset_import: ["": 17, "f": 1]> m (a, b) => (c) {{ {body} }}""")
    change(model)
    return model


def again(name: str) -> Change:
    """Repeat the first entry of a list of the graph."""
    return lambda model: getattr(model.graph, name).append(getattr(model.graph, name)[0])


INT, FLOAT = AttributeProto.INT, AttributeProto.FLOAT
IMAGE = "n, 4, 5, 5"
W_4 = "float[4, 1, 1, 1] w = {1, 2, 3, 4}"

MODELS: dict[str, tuple[Callable[[], ModelProto | bytes], tuple[str, ...]]] = {
    # the file
    "garbage": (lambda: b"\x08\x08\x3a" + bytes(50), ("is not a complete ONNX model",)),
    "cut": (lambda: mlp().SerializeToString()[:-20], ("is not a complete ONNX model",)),
    "too long a field": (lambda: mlp().SerializeToString() + b"\x3a\xff\xff\xff\xff\x0f", ("can't be decoded",)),
    "name of a node": (
        lambda: mlp().SerializeToString().replace(b"third", b"th\xff\xfe."),
        ("NodeProto.name", "UTF-8"),
    ),
    "name of a value": (lambda: mlp().SerializeToString().replace(b"\1k", b"\1\xff"), ("NodeProto.output", "UTF-8")),
    # tensors
    "too few numbers": (lambda: mlp(field("initializer[0]", float_data=[1.0] * 11)), ("'w1'", "[4, 3]", "stores 11")),
    "too many numbers": (lambda: mlp(field("initializer[0]", float_data=[1.0] * 13)), ("'w1'", "[4, 3]", "stores 13")),
    "too few bytes": (lambda: mlp(field("initializer[0]", float_data=[], raw_data=bytes(47))), ("'w1'", "48 bytes")),
    "2^62 rows": (
        lambda: mlp(field("initializer[0]", dims=[2**62, 3])),
        ("'w1'", "invalid sizes", "4611686018427387904"),
    ),
    "2^64 elements": (lambda: mlp(field("initializer[0]", dims=[2**32, 2**32])), ("'w1'", "invalid sizes")),
    "negative sizes": (lambda: mlp(field("initializer[0]", dims=[-4, -3])), ("'w1'", "invalid sizes [-4, -3]")),
    "no rows": (lambda: mlp(field("initializer[0]", dims=[0, 3])), ("'w1'", "need 0 numbers, but stores 12")),
    "weight without a type": (lambda: mlp(field("initializer[0]", data_type=0)), ("'w1'", "the unknown type 0")),
    "weight of type 99": (lambda: mlp(field("initializer[0]", data_type=99)), ("'w1'", "the unknown type 99")),
    "numbers for strings": (lambda: mlp(field("initializer[0]", data_type=8)), ("'w1'", "12 strings, but stores 0")),
    "attribute with too few numbers": (
        lambda: of(
            "y = Constant <value = float[5] five {1, 2, 3, 4, 5}> ()",
            change=lambda m: m.graph.node[-1].attribute[0].t.float_data.pop(),
        ),
        ("'five'", "[5]", "stores 4"),
    ),
    # sparse tensors
    "sparse index": (lambda: mlp(sparse([0, 99])), ("w2", "index value at position [1]")),
    "sparse negative index": (lambda: mlp(sparse([-1, 3])), ("w2", "index value at position [0]")),
    "sparse order": (lambda: mlp(sparse([3, 0])), ("w2", "not in sorted order")),
    "sparse values": (lambda: mlp(sparse([0, 3], (1,))), ("'w2'", "need 2 numbers, but stores 1")),
    "sparse and dense": (lambda: mlp(sparse([0, 3], name="w1")), ("'w1' twice", "a sparse tensor")),
    # external data
    "data outside": (lambda: mlp(external(location="../w.bin")), ("'w1'", "outside the model's folder")),
    "absolute path": (lambda: mlp(external(location="/etc/passwd")), ("'w1'", "outside the model's folder")),
    "missing data": (lambda: mlp(external(location="v.bin")), ("'v.bin' is missing", "'w1'")),
    "short data": (lambda: mlp(external(location="w.bin", offset="4")), ("'w.bin' is cut short", "'w1'")),
    "other length": (lambda: mlp(external(location="w.bin", length="44")), ("'w1' has 48 bytes",)),
    "word as offset": (lambda: mlp(external(location="w.bin", offset="four")), ("'w1' has 48 bytes",)),
    "no location": (lambda: mlp(external(offset="0")), ("'w1' has 48 bytes",)),
    # declared types
    "untyped input": (lambda: mlp(lambda m: m.graph.input[0].ClearField("type")), ("input 'x' has no element type",)),
    "input of type 0": (lambda: mlp(field("input[0]", type=kind(0, "n", 4))), ("input 'x' has no element type",)),
    "input of type 99": (lambda: mlp(field("input[0]", type=kind(99, "n", 4))), ("value 'x'", "unknown type 99")),
    "output of type 99": (lambda: mlp(field("output[0]", type=kind(99, "n", 2))), ("value 'y'", "unknown type 99")),
    "value of type 99": (
        lambda: mlp(lambda m: m.graph.value_info.append(helper.make_value_info("k", kind(99)))),
        ("value 'k'", "unknown type 99"),
    ),
    "input of strings": (lambda: mlp(field("input[0]", type=kind(8, "n", 4))), ("contradict", "'first' (MatMul)")),
    "output of integers": (lambda: mlp(field("output[0]", type=kind(7, "n", 2))), ("contradict", "'fourth' (MatMul)")),
    "input of 5 columns": (lambda: mlp(field("input[0]", type=kind(1, "n", 5))), ("contradict", "'first' (MatMul)")),
    "input of 2^62 columns": (
        lambda: mlp(field("input[0]", type=kind(1, "n", 2**62))),
        ("contradict", "'first' (MatMul)"),
    ),
    "input without columns": (lambda: mlp(field("input[0]", type=kind(1, "n", 0))), ("contradict", "'first' (MatMul)")),
    "scalar input": (lambda: mlp(field("input[0]", type=kind(1))), ("contradict", "'first' (MatMul)")),
    "transposed weight": (lambda: mlp(field("initializer[0]", dims=[3, 4])), ("contradict", "'first' (MatMul)")),
    "vector for a matrix": (lambda: mlp(field("initializer[0]", dims=[12])), ("contradict", "'first' (MatMul)")),
    "strings for numbers": (
        lambda: of("y = Add(z, s)", weights='string[4] s = {"a", "b", "c", "d"}'),
        ("contradict", "'Add_y' (Add)"),
    ),
    "float and double": (
        lambda: of("y = Add(z, s)", weights="double[4] s = {1, 2, 3, 4}"),
        ("contradict", "'Add_y' (Add)"),
    ),
    "float indices": (lambda: of("y = Gather(z, w)"), ("contradict", "'Gather_y' (Gather)")),
    # names
    "value twice": (lambda: mlp(field("node[2]", output=["k"])), ("'k' has been used as output names",)),
    "node writes an input": (lambda: mlp(field("node[2]", output=["x"])), ("'x' has been used as output names",)),
    "node writes a weight": (lambda: mlp(field("node[2]", output=["w2"])), ("'w2' has been used as output names",)),
    "input twice": (lambda: mlp(again("input")), ("'x' has been used as graph input names",)),
    "weight twice": (lambda: mlp(weight(np.ones((2, 2), np.float32))), ("contradict", "'first' (MatMul)")),
    "cycle": (lambda: mlp(field("node[0]", input=["s", "w1"])), ("input 's' of node", "first")),
    "own result": (lambda: mlp(field("node[0]", input=["h", "w1"])), ("input 'h' of node", "first")),
    "undefined input": (lambda: mlp(field("node[0]", input=["nowhere", "w1"])), ("input 'nowhere' of node", "first")),
    "undefined output": (lambda: mlp(field("output[0]", name="nowhere")), ("Graph output 'nowhere'",)),
    "unnamed output": (lambda: mlp(field("output[0]", name="")), ("'name' of 'value_info'",)),
    "unnamed input": (lambda: mlp(field("input[0]", name="")), ("'name' of 'value_info'",)),
    "no nodes": (lambda: mlp(lambda m: m.graph.ClearField("node")), ("Graph output 'y'",)),
    # operators
    "no operator": (lambda: mlp(field("node[0]", op_type="")), ("no operator", "'first'")),
    "unknown operator": (lambda: mlp(field("node[0]", op_type="Frobnicate")), ("no operator Frobnicate ('first')",)),
    "unknown domain": (
        lambda: mlp(field("node[0]", domain="no.such")),
        ("MatMul ('first') of 'no.such'", "no version"),
    ),
    "input too many": (lambda: mlp(field("node[0]", input=["x", "w1", "b1"])), ("Node(first)", "input size 3")),
    "input too few": (lambda: mlp(field("node[0]", input=["x"])), ("Node(first)", "input size 1")),
    "gap": (lambda: mlp(field("node[0]", input=["", "w1"])), ("Node (first)'s input 0",)),
    "gap in many": (lambda: of("y = Sum(z, , w)"), ("node 'y' (Sum) has no input 1",)),
    "output too many": (lambda: mlp(field("node[0]", output=["h", "more"])), ("Node(first)", "output size 2")),
    "no output": (lambda: mlp(field("node[0]", output=[])), ("Node(first)", "output size 0")),
    "no opset": (lambda: mlp(lambda m: m.ClearField("opset_import")), ("does not import an opset of the standard",)),
    "opset 0": (lambda: mlp(lambda m: m.opset_import.add(version=0)), ("version 0 of 'ai.onnx'",)),
    "opset -1": (lambda: mlp(lambda m: m.opset_import.add(version=-1)), ("version -1 of 'ai.onnx'",)),
    "opset 2^40": (lambda: mlp(lambda m: m.opset_import.add(version=2**40)), ("version 1099511627776 of 'ai.onnx'",)),
    "IR version 999": (lambda: mlp(lambda m: setattr(m, "ir_version", 999)), ("ir_version 999",)),
    # attributes
    "float for an integer": (
        lambda: of("y = Softmax(z)", change=attribute("axis", type=FLOAT, f=1)),
        ("y : axis", "'FLOAT'"),
    ),
    "text for a number": (
        lambda: of("y = Softmax(z)", change=attribute("axis", type=AttributeProto.STRING, s=b"one")),
        ("y : axis", "'STRING'"),
    ),
    "untyped attribute": (lambda: of("y = Softmax(z)", change=attribute("axis", i=1)), ("'type' of 'attr'", "Name: y")),
    "unnamed attribute": (
        lambda: of("y = Softmax(z)", change=attribute("", type=INT, i=1)),
        ("'name' of 'attr'", "Name: y"),
    ),
    "two values": (lambda: of("y = Softmax(z)", change=attribute("axis", type=INT, i=1, f=1)), ("axis", "Name: y")),
    "unknown attribute": (lambda: of("y = Softmax(z)", change=attribute("axle", type=INT, i=1)), ("axle", "Softmax")),
    "attribute twice": (
        lambda: of(
            "y = Softmax <axis = 1> (z)",
            change=lambda m: m.graph.node[-1].attribute.append(m.graph.node[-1].attribute[0]),
        ),
        ("'axis' appeared multiple times", "Name: y"),
    ),
    "reference outside of functions": (
        lambda: of("y = Softmax(z)", change=attribute("axis", type=INT, ref_attr_name="a")),
        ("'axis' of node 'y'", "'a'"),
    ),
    "missing attribute": (lambda: of("y = Concat(z, z)"), ("'axis' is missing", "Name: y")),
    "axis -5": (lambda: of("y = Softmax <axis = -5> (z)"), ("contradict", "'Softmax_y' (Softmax)")),
    "axis 3": (lambda: of("y = Softmax <axis = 3> (z)"), ("contradict", "'Softmax_y' (Softmax)")),
    "axis 2^62": (lambda: of("y = Softmax <axis = 4611686018427387904> (z)"), ("node 'y' (Softmax) has the axis",)),
    "axis of a normalization": (
        lambda: of("y = LayerNormalization <axis = 5> (z, w)"),
        ("contradict", "its axis is 5"),
    ),
    "axis of a reduction": (lambda: of("y = ReduceMean <axes = [-7]> (z)"), ("contradict", "'ReduceMean_y'")),
    "permutation with a repeated axis": (
        lambda: of("y = Transpose <perm = [1, 1, 0]> (z)"),
        ("contradict", "'Transpose_y'"),
    ),
    "permutation of too few axes": (lambda: of("y = Transpose <perm = [0]> (z)"), ("contradict", "'Transpose_y'")),
    "cast to type 0": (lambda: of("y = Cast <to = 0> (z)"), ("node 'y' (Cast)", "type 0")),
    "cast to type 99": (lambda: of("y = Cast <to = 99> (z)"), ("contradict", "'Cast_y' (Cast)")),
    "constant of two values": (
        lambda: of("y = Constant <value_float = 1.0, value_int = 1> ()"),
        ("node 'y' (Constant) has 2 values",),
    ),
    "constant without a value": (lambda: of("y = Constant ()"), ("node 'y' (Constant) has 0 values",)),
    "equation": (lambda: of('y = Einsum <equation = "ijk,kl->q"> (z, w)'), ("contradict", "'Einsum_y' (Einsum)")),
    # sizes
    "sum of 4 and 3": (lambda: of("y = Add(z, w)", weights="float[3] w = {1, 2, 3}"), ("contradict", "'Add_y' (Add)")),
    "product": (
        lambda: of("y = MatMul(z, w)", weights="float[3] w = {1, 2, 3}"),
        ("contradict", "'MatMul_y' (MatMul)"),
    ),
    "reshape to another count": (
        lambda: of("y = Reshape(z, s)", "3, 4", "int64[2] s = {5, 2}"),
        ("contradict", "'Reshape_y'", "it makes the shape [5, 2]"),
    ),
    "reshape to two free sizes": (
        lambda: of("y = Reshape(z, s)", weights="int64[2] s = {-1, -1}"),
        ("contradict", "'Reshape_y'"),
    ),
    "groups": (
        lambda: of("y = Conv <group = 3> (x, w)", IMAGE, W_4),
        ("contradict", "'Conv_y'", "its group 3 does not divide"),
    ),
    "channels": (
        lambda: of("y = Conv(x, w)", IMAGE, W_4),
        ("contradict", "'x' has 4 channels, but its weight 'w' is for 1"),
    ),
    "kernel": (
        lambda: of("y = Conv <group = 4, kernel_shape = [3, 3]> (x, w)", IMAGE, W_4),
        ("contradict", "its kernel_shape is [3, 3]"),
    ),
    "stride 0": (lambda: of("y = Conv <group = 4, strides = [0, 0]> (x, w)", IMAGE, W_4), ("contradict", "'Conv_y'")),
    "window of size 0": (lambda: of("y = MaxPool <kernel_shape = [0, 0]> (x)", IMAGE), ("contradict", "'MaxPool_y'")),
    "blocks": (
        lambda: of("y = DepthToSpace <blocksize = 3> (x)", IMAGE),
        ("contradict", "its blocksize 3 does not divide"),
    ),
    "parts": (lambda: of("y, t = Split <num_outputs = 3> (z)", opset=18), ("contradict", "its num_outputs is 3")),
    "sizes of parts": (
        lambda: of("y, t = Split <axis = -1> (z, s)", weights="int64[2] s = {2, 3}"),
        ("contradict", "'Split_y' (Split)"),
    ),
    "pads": (lambda: of("y = Pad(z, s)", weights="int64[3] s = {1, 1, 1}"), ("contradict", "'Pad_y' (Pad)")),
    "step 0": (
        lambda: of("y = Slice(z, i, j, i, i)", weights="int64[1] i = {0}, int64[1] j = {2}"),
        ("contradict", "'Slice_y' (Slice)"),
    ),
    "top 9 of 4": (lambda: of("y, i = TopK(z, m)", weights="int64[1] m = {9}"), ("contradict", "'TopK_y' (TopK)")),
    # bodies
    "branch of a name that is undefined": (
        lambda: of(branches("a = Relu(nowhere)")),
        ("input 'nowhere' of node", "Name: y"),
    ),
    "branch without its output": (lambda: of(branches("q = Relu(z)")), ("Graph output 'a'", "Name: y")),
    "branch with an input": (
        lambda: of(branches(head="(float q) => (float[n] a)")),
        ("node 'y' (If)", "1 inputs, but passes it 0"),
    ),
    "branch with an output too many": (
        lambda: of(branches("a = Relu(z) q = Tanh(z)", head="() => (float[n] a, float[n] q)")),
        ("node 'y' (If)", "2 outputs"),
    ),
    "branch of another type": (
        lambda: of(branches("a = Cast <to = 7> (z)", head="() => (int64[n] a)")),
        ("node 'y' (If)", "different types of output 0"),
    ),
    "branch that hides a value": (
        lambda: of(branches(other="z = Tanh(x) b = Relu(z)")),
        ("'z' has been used", "Name: y"),
    ),
    "loop with a state too many": (lambda: loop(passed="m, c, z, z"), ("node 'y' (Loop)", "3 inputs, but passes it 4")),
    "loop with a state too few": (lambda: loop(passed="m, c"), ("node 'y' (Loop)", "3 inputs, but passes it 2")),
    "loop with an output too many": (
        lambda: loop(outputs="bool u, float[n] v, float[n] v2", more="v2 = Relu(v)"),
        ("node 'y' (Loop)", "3 outputs"),
    ),
    "loop whose state changes its type": (
        lambda: loop(outputs="bool u, int64[n] p", more="p = Cast <to = 7> (v)"),
        ("contradict", "'Loop_y' (Loop)"),
    ),
    "loop with a value twice": (lambda: loop(more="v = Relu(s)"), ("'v' has been used as output names", "Name: y")),
    "scan of 7 inputs": (lambda: scan("num_scan_inputs = 7"), ("contradict", "(Scan)", "num_scan_inputs (7)")),
    "scan of -1 inputs": (lambda: scan("num_scan_inputs = -1"), ("contradict", "(Scan)")),
    "scan with a body of 1 input": (
        lambda: scan("num_scan_inputs = 1", "float[4] s"),
        ("(Scan)", "1 inputs, but passes it 2"),
    ),
    "scan along 3 axes": (
        lambda: scan("num_scan_inputs = 1, scan_input_axes = [0, 0, 0]"),
        ("contradict", "(Scan)", "axes"),
    ),
    # functions
    "function calls itself": (lambda: function(body="c = f.m(a, b)"), ("f::m -> f::m",)),
    "function reads a name that is undefined": (
        lambda: function(body="c = Mul(a, nowhere)"),
        ("'nowhere'", "c", "Mul"),
    ),
    "function with a cycle": (lambda: function(body="d = Mul(a, c) c = Mul(d, b)"), ("input 'c' of node",)),
    "function with a value twice": (
        lambda: function(body="c = Mul(a, b) c = Relu(a)"),
        ("'c' has been used as output",),
    ),
    "function with an unknown operator": (lambda: function(body="c = Frobnicate(a, b)"), ("Frobnicate",)),
    "function twice": (lambda: function(change=lambda m: m.functions.append(m.functions[0])), ("'f::m'",)),
    "call with too few inputs": (lambda: function("x"), ("m/Mul", "input 1")),
    "call with too many inputs": (lambda: function("x, w, w"), ("node 'y' (m) has 3 inputs",)),
}
"""A name -> a model, and what its message contains."""

COMMANDS = (
    ("inspect", "m.onnx"),
    ("build", "m.onnx", "--loss", "mse", "-o", "out.onnx"),
    ("derive", "m.onnx", "-o", "out.onnx"),
)


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path, capsys)


def refused(shell: Shell, model: ModelProto | bytes) -> list[Result]:
    """Run each command on a model, and return the results. No command may write a file."""
    before = {"m.onnx": model if isinstance(model, bytes) else model.SerializeToString(), "w.bin": bytes(48)}
    for name, data in before.items():
        (shell.folder / name).write_bytes(data)
    results = [shell(*command) for command in COMMANDS]
    assert shell.files() == before
    return results


@pytest.mark.parametrize("name", MODELS)
def test_every_command_refuses_it_with_the_same_message(shell: Shell, name: str) -> None:
    make, words = MODELS[name]
    results = refused(shell, make())
    told = {result.err.split("hint: ")[0] for result in results}
    assert [result.code for result in results] == [1, 1, 1], told
    assert len(told) == 1 and all("hint: " in result.err for result in results), told
    text = told.pop()
    assert text.startswith("error: ") and "internal" not in text and "Traceback" not in text
    for word in words:
        assert word in text


ACCEPTED: dict[str, Callable[[], ModelProto]] = {
    "the last of two opsets": lambda: mlp(lambda m: m.opset_import.add(version=13)),
    "no IR version": lambda: mlp(lambda m: m.ClearField("ir_version")),
    "node names twice": lambda: mlp(field("node[1]", name="first")),
    "output twice": lambda: mlp(again("output")),
    "nodes in reverse": lambda: mlp(lambda m: m.graph.node.sort(key=lambda node: node.name, reverse=True)),
    "other size of a value": lambda: mlp(declared(kind(1, "batch", 7))),
    "other rank of a value": lambda: mlp(declared(kind(1, 3))),
    "other type of a value": lambda: mlp(declared(kind(7, "batch", 3))),
    "negative size of a value": lambda: mlp(declared(kind(1, "batch", -5))),
    "value declared twice": lambda: mlp(declared(kind(1, "batch", 3), kind(1, "batch", 4))),
    "other size of an output": lambda: mlp(field("output[0]", type=kind(1, "batch", 5))),
    "negative size of an input": lambda: mlp(field("input[0]", type=kind(1, -1, 4))),
    "batch of 2^62": lambda: mlp(field("input[0]", type=kind(1, 2**62, 4))),
    "batch of 0": lambda: mlp(field("input[0]", type=kind(1, 0, 4))),
    "NaN among the weights": lambda: mlp(field("initializer[1]", float_data=[1, float("nan"), 3])),
    "metadata twice": lambda: mlp(lambda m: [m.metadata_props.add(key="a", value=v) for v in "12"]),
    "sparse weight": lambda: mlp(sparse([0, 3])),
    "deprecated operator": lambda: onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18]>
        g (float[n, 6, 4] x) => (float[n, 6, 4] y) <float[2] s = {1, 2}, float[2] b = {0, 1}> {
            y = GroupNormalization <num_groups = 2> (x, s, b) }"""),
}  # fmt: skip
"""Models that break the standard or can't be run, but whose meaning is clear; onnxruntime loads most of them."""


def declared(*types: TypeProto) -> Change:
    return lambda model: model.graph.value_info.extend(helper.make_value_info("k", each) for each in types)


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_has_a_clear_meaning_is_accepted_by_every_command(shell: Shell, name: str) -> None:
    onnx.save(ACCEPTED[name](), "m.onnx")
    results = [shell(*command, "--force") if "-o" in command else shell(*command) for command in COMMANDS]
    assert [result.code for result in results] == [0, 0, 0], [result.err for result in results]


@pytest.mark.parametrize("name", ["too few numbers", "cycle", "unknown operator", "branch with an input"])
def test_a_model_in_memory_is_checked_like_a_file(name: str) -> None:
    make, words = MODELS[name]
    model = make()
    assert isinstance(model, ModelProto)
    with pytest.raises(OnnxgradError) as error:
        build(model)
    assert all(word in str(error.value) for word in words)
