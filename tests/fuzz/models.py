"""Mutations of ONNX models that know what a model means: most of what they make is still, or nearly, a valid model."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from tests.fuzz import hostile, messages
from tests.fuzz.corpus import Seed

Mutation = Callable[[Seed, Random], str]


def mutate(seed: Seed, rng: Random) -> list[str]:
    """Change the model of a seed, mostly once; says how."""
    done = []
    for _ in range(rng.choice((1, 1, 1, 1, 2, 2, 3, 6))):
        way = messages_only if rng.random() < 0.5 else rng.choice(MUTATIONS)
        try:
            with np.errstate(all="ignore"):
                done.append(way(seed, rng))
        except Exception as error:  # there is nothing of that kind, or no longer
            done.append(f"({way.__name__} had nothing to change: {error})")
    return done


def messages_only(seed: Seed, rng: Random) -> str:
    """Any field of any message."""
    return messages.mutate(seed.model, rng)


def rename_value(seed: Seed, rng: Random) -> str:
    """A value gets a hostile name wherever it is called by its own: the graph means what it meant."""
    names = sorted({name for node in seed.model.graph.node for name in (*node.input, *node.output) if name})
    old, new = rng.choice(names), hostile.string(rng)
    _rename(seed.model.graph, old, new)
    for key in (old,):
        if key in seed.arrays:
            seed.arrays = {**seed.arrays, new: seed.arrays[key]}
    return f"rename value {old!r} to {new[:40]!r}"


def _rename(graph: GraphProto, old: str, new: str) -> None:
    for node in graph.node:
        for names in (node.input, node.output):
            names[:] = [new if name == old else name for name in names]
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs):
                if body.node:
                    _rename(body, old, new)
    for named in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        if named.name == old:
            named.name = new


def rename_node(seed: Seed, rng: Random) -> str:
    """A node, the graph, the producer, a module or an operator gets a hostile name."""
    new, node, model = hostile.string(rng), rng.choice(seed.model.graph.node), seed.model
    where = rng.choice(("node", "graph", "producer", "scopes", "doc", "domain", "operator", "symbol", "metadata"))
    if where == "node":
        node.name = new
    elif where == "graph":
        model.graph.name = new
    elif where == "producer":
        model.producer_name, model.producer_version = new, hostile.string(rng)
    elif where == "scopes":
        key = rng.choice(
            ("pkg.torch.onnx.name_scopes", "pkg.torch.onnx.class_hierarchy", "namespace", "pkg.torch.onnx.stack_trace")
        )
        node.metadata_props.add(
            key=key, value=rng.choice((new, f"['', {new!r}]", "{}", "[1, [2]]", "[" * 3000, "['a', 'a.b']"))
        )
    elif where == "doc":
        rng.choice((model, model.graph, node)).doc_string = new
    elif where == "domain":
        node.domain = new
        model.opset_import.add(domain=new, version=1)
    elif where == "operator":
        node.op_type = new
    elif where == "symbol":
        value = rng.choice([*model.graph.input, *model.graph.output])
        value.type.tensor_type.shape.dim.add().dim_param = new
    else:
        keys = ("onnxgrad", "onnxgrad.version", "onnxgrad.roles", "onnxgrad.inputs", "onnxgrad.report", new)
        model.metadata_props.add(key=rng.choice(keys), value=rng.choice((new, "{}", "[]", "null", "1", '{"a": 1}')))
    return f"{where} becomes {new[:40]!r}"


def external(seed: Seed, rng: Random) -> str:
    """A weight goes into a file beside the model, as the entries say, which may lie."""
    tensor = rng.choice([t for t in _tensors(seed.model) if t.data_type not in (TensorProto.STRING, 0)])
    raw = numpy_helper.to_array(tensor).tobytes()
    location = rng.choice(hostile.LOCATIONS) if rng.random() < 0.6 else "data.bin"
    for field in ("raw_data", "float_data", "double_data", "int32_data", "int64_data", "uint64_data"):
        tensor.ClearField(field)
    tensor.data_location = TensorProto.EXTERNAL
    entries = [("location", location), ("offset", "0"), ("length", str(len(raw)))]
    for _ in range(rng.choice((0, 0, 0, 1, 2))):
        key = rng.choice(("location", "offset", "length", "checksum", "basepath", hostile.string(rng)))
        entries.insert(rng.randrange(len(entries) + 1), (key, rng.choice((*hostile.NUMERALS, *hostile.LOCATIONS))))
    if rng.random() < 0.3:
        entries.pop(rng.randrange(len(entries)))
    for key, value in entries:
        tensor.external_data.add(key=key, value=value)
    seed.beside = {**seed.beside, "data.bin": raw + bytes(rng.choice((0, 0, 64, -1)) % 65)}
    return f"external data of {tensor.name[:40]!r}: {str(entries)[:200]}"


def external_again(seed: Seed, rng: Random) -> str:
    """An entry of external data is another one."""
    tensors = [t for t in _tensors(seed.model) if t.external_data]
    entry = rng.choice(rng.choice(tensors).external_data)
    entry.value = rng.choice(hostile.LOCATIONS if entry.key == "location" else hostile.NUMERALS)
    return f"external {entry.key} = {entry.value[:40]!r}"


def declare(seed: Seed, rng: Random) -> str:
    """A value is declared of a type or a shape that it hasn't."""
    graph = seed.model.graph
    names = [name for node in graph.node for name in node.output if name]
    dims = [
        rng.choice((hostile.integer(rng, -(2**63), 2**63 - 1), "batch", "N", "", rng.choice((1, 2, 3))))
        for _ in range(rng.randrange(6))
    ]
    value = helper.make_tensor_value_info(rng.choice(names), rng.choice(range(24)), dims)
    where = rng.choice((graph.value_info, graph.value_info, graph.output, graph.input))
    where.append(value)
    return f"declare {value.name!r}: {value.type.tensor_type.elem_type} {dims}"


def resize(seed: Seed, rng: Random) -> str:
    """A declared size, of an input, an output or a weight, is another one."""
    graph = seed.model.graph
    values = [
        v.type.tensor_type.shape.dim
        for v in (*graph.input, *graph.output, *graph.value_info)
        if v.type.HasField("tensor_type")
    ]
    if rng.random() < 0.3:
        tensor = rng.choice(graph.initializer)
        where = rng.randrange(len(tensor.dims) or 1)
        size = hostile.integer(rng, -(2**63), 2**63 - 1)
        tensor.dims[where : where + 1] = [size]
        return f"size {where} of weight {tensor.name!r} is {size}"
    dim = rng.choice(rng.choice([shape for shape in values if shape]))
    dim.Clear()
    size = rng.choice(
        (hostile.integer(rng, -(2**63), 2**63 - 1), rng.choice(range(5)), hostile.string(rng), "batch", None)
    )
    if isinstance(size, int):
        dim.dim_value = size
    elif size is not None:
        dim.dim_param = size
    return f"a size is {str(size)[:40]!r}"


def retype(seed: Seed, rng: Random) -> str:
    """All floats become of another type, in values, weights and Cast."""
    new = rng.choice(
        (
            TensorProto.DOUBLE,
            TensorProto.FLOAT16,
            TensorProto.BFLOAT16,
            TensorProto.INT64,
            TensorProto.BOOL,
            TensorProto.STRING,
            TensorProto.COMPLEX64,
        )
    )
    graph = seed.model.graph
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = new
    for tensor in graph.initializer:
        if tensor.data_type == TensorProto.FLOAT and new != TensorProto.STRING:
            x = numpy_helper.to_array(tensor).astype(helper.tensor_dtype_to_np_dtype(new))
            tensor.CopyFrom(numpy_helper.from_array(x, tensor.name))
    return f"floats are {TensorProto.DataType.Name(new)}"


def opset(seed: Seed, rng: Random) -> str:
    """The model says another opset or version of the format."""
    version = rng.choice((*range(1, 30), *hostile.INTEGERS))
    if rng.random() < 0.2:
        seed.model.ir_version = max(version, 0)
        return f"ir_version {version}"
    entry = rng.choice(seed.model.opset_import)
    entry.version = version
    return f"opset {entry.domain!r} {version}"


def set_attribute(seed: Seed, rng: Random) -> str:
    """An attribute of a node has a value at an edge, is of another type, refers to one of no function, or is new."""
    node = rng.choice([n for n in _nodes(seed.model.graph) if n.attribute])
    attribute = rng.choice(node.attribute)
    how = rng.choice(("number", "number", "numbers", "numbers", "text", "reference", "tensor", "graph", "repeat"))
    name = attribute.name
    if how == "repeat":
        node.attribute.add().CopyFrom(attribute)
        return f"{node.op_type}.{name} twice"
    attribute.Clear()
    attribute.name = name
    if how == "number":
        attribute.type, attribute.i = AttributeProto.INT, hostile.integer(rng, -(2**63), 2**63 - 1)
    elif how == "numbers":
        attribute.type = AttributeProto.INTS
        attribute.ints[:] = [rng.choice((*hostile.INTEGERS, 0, 1, 2, 3)) for _ in range(rng.choice((0, 1, 2, 3, 4, 8)))]
    elif how == "text":
        attribute.type, attribute.s = AttributeProto.STRING, hostile.string(rng).encode()
    elif how == "reference":
        attribute.type, attribute.ref_attr_name = AttributeProto.INT, hostile.string(rng)
    elif how == "tensor":
        attribute.type = AttributeProto.TENSOR
        attribute.t.CopyFrom(
            TensorProto(dims=[hostile.integer(rng, 0, 2**40)], data_type=rng.randrange(24), raw_data=b"\x00" * 8)
        )
    else:
        attribute.type = AttributeProto.GRAPH
        attribute.g.CopyFrom(GraphProto.FromString(seed.model.graph.SerializeToString()))  # it will lie in itself
    return f"{node.op_type}.{name} is of {how}"


def rewire(seed: Seed, rng: Random) -> str:
    """A node reads or gives another value: of another type or shape, its own, a later one, none."""
    nodes = seed.model.graph.node
    names = [name for node in nodes for name in (*node.input, *node.output)] + [
        t.name for t in seed.model.graph.initializer
    ]
    node = rng.choice([n for n in nodes if n.input])
    target = node.input if rng.random() < 0.8 or not node.output else node.output
    where, new = rng.randrange(len(target) + 1), rng.choice((*names, "", "nowhere"))
    target[where : where + 1] = [new]
    return f"{node.op_type} {'input' if target is node.input else 'output'} {where} is {new[:40]!r}"


def in_function(seed: Seed, rng: Random) -> str:
    """The nodes go into a function, which may call itself, refer to attributes, or be there twice."""
    graph = seed.model.graph
    inputs = [
        *[v.name for v in graph.input],
        *[t.name for t in graph.initializer if t.name not in {v.name for v in graph.input}],
    ]
    body = list(graph.node)
    if rng.random() < 0.3:
        body.insert(rng.randrange(len(body) + 1), helper.make_node("Whole", inputs, ["again"], domain="fuzz"))
    outputs = [v.name for v in graph.output]
    function = FunctionProto(
        name="Whole", domain="fuzz", input=inputs, output=outputs, opset_import=seed.model.opset_import
    )
    function.node.extend(body)
    for node in function.node:
        for attribute in node.attribute:
            if rng.random() < 0.2:
                attribute.ref_attr_name = attribute.name
                function.attribute.append(attribute.name)
    seed.model.functions.extend([function] * rng.choice((1, 1, 1, 2)))
    seed.model.opset_import.add(domain="fuzz", version=rng.choice((1, 1, 1, 2)))
    del graph.node[:]
    graph.node.append(helper.make_node("Whole", inputs, outputs, domain="fuzz", name="call"))
    return "the graph in a function"


def function_bomb(seed: Seed, rng: Random) -> str:
    """Functions that call the one before twice: few bytes, many nodes."""
    depth = rng.choice((3, 10, 23, 40, 63))
    graph, calls = seed.model.graph, "Identity"
    for level in range(depth):
        domain = "" if level == 0 else "bomb"
        function = FunctionProto(
            name=f"F{level}",
            domain="bomb",
            input=["x"],
            output=["y"],
            opset_import=[helper.make_opsetid("", 17), helper.make_opsetid("bomb", 1)],
        )
        function.node.extend(
            [helper.make_node(calls, ["x"], ["h"], domain=domain), helper.make_node(calls, ["h"], ["y"], domain=domain)]
        )
        seed.model.functions.append(function)
        calls = f"F{level}"
    seed.model.opset_import.add(domain="bomb", version=1)
    node = rng.choice([n for n in graph.node if n.input and n.input[0]])
    graph.node.insert(0, helper.make_node(calls, [node.input[0]], ["bomb_out"], domain="bomb"))
    node.input[0] = "bomb_out"
    return f"functions that double {depth} times"


def in_if(seed: Seed, rng: Random) -> str:
    """The nodes go into a branch or a body, whose names may be those outside."""
    graph = seed.model.graph
    outputs = [helper.make_value_info(v.name, v.type) for v in graph.output]
    branch = helper.make_graph(list(graph.node), rng.choice(("branch", hostile.string(rng))), [], outputs)
    other = (
        helper.make_graph(list(graph.node)[: rng.randrange(len(graph.node) + 1)], "other", [], outputs)
        if rng.random() < 0.3
        else branch
    )
    graph.initializer.append(numpy_helper.from_array(_one(True), "condition"))
    del graph.node[:]
    names = [v.name for v in graph.output] if rng.random() < 0.5 else [f"{v.name}_outer" for v in graph.output]
    for value, name in zip(graph.output, names, strict=True):
        value.name = name
    graph.node.append(helper.make_node("If", ["condition"], names, then_branch=branch, else_branch=other))
    return "the graph in an If"


def in_loop(seed: Seed, rng: Random) -> str:
    """A loop of many rounds is put before a node."""
    graph = seed.model.graph
    rounds = rng.choice((0, 1, 3, 10**6, 2**40, -1, 2**63 - 1))
    types = {v.name: v.type for v in graph.input}
    node = rng.choice([n for n in graph.node if n.input and n.input[0] in types])
    type_ = types[node.input[0]]
    body = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["c2"]), helper.make_node("Identity", ["h"], ["h2"])], "body",
        [helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("c", TensorProto.BOOL, []), helper.make_value_info("h", type_)],
        [helper.make_tensor_value_info("c2", TensorProto.BOOL, []), helper.make_value_info("h2", type_)],
    )  # fmt: skip
    graph.initializer.append(numpy_helper.from_array(_one(rounds), "rounds"))
    graph.node.insert(0, helper.make_node("Loop", ["rounds", "", node.input[0]], ["looped"], body=body))
    node.input[0] = "looped"
    return f"a loop of {rounds} rounds"


def huge(seed: Seed, rng: Random) -> str:
    """A few bytes that ask for very many: a Range, an Expand, a Pad, a Tile, a ConstantOfShape, a Slice of them."""
    graph = seed.model.graph
    size = rng.choice((10**4, 10**7, 2**31, 2**40, 2**62, -1, 0))
    dims = rng.choice(([size], [size, size], [3, size]))
    op = rng.choice(("ConstantOfShape", "Range", "Expand", "Tile", "Pad", "OneHot", "EyeLike"))
    graph.initializer.extend(
        [numpy_helper.from_array(_one(dims), "huge_shape"), numpy_helper.from_array(_one(1.0), "huge_one")]
    )
    graph.initializer.extend(
        [numpy_helper.from_array(_one(n), f"huge_{n}") for n in (0, 1)]
        + [numpy_helper.from_array(_one(size), "huge_size")]
    )
    made = {
        "ConstantOfShape": lambda: helper.make_node("ConstantOfShape", ["huge_shape"], ["huge"]),
        "Range": lambda: helper.make_node("Range", ["huge_0", "huge_size", "huge_1"], ["huge"]),
        "Expand": lambda: helper.make_node("Expand", ["huge_one", "huge_shape"], ["huge"]),
        "Tile": lambda: helper.make_node("Tile", [rng.choice(graph.node).output[0], "huge_shape"], ["huge"]),
        "Pad": lambda: helper.make_node("Pad", [graph.input[0].name, "huge_shape"], ["huge"]),
        "OneHot": lambda: helper.make_node("OneHot", ["huge_shape", "huge_size", "huge_shape"], ["huge"]),
        "EyeLike": lambda: helper.make_node("EyeLike", ["huge_shape"], ["huge"]),
    }[op]()
    graph.node.append(made)
    graph.node.append(helper.make_node("ReduceSum", ["huge"], ["huge_sum"], keepdims=0))
    last = graph.output[0]
    graph.node.append(helper.make_node("Add", [last.name, "huge_sum"], ["huge_y"]))
    last.name = "huge_y"
    return f"{op} of {dims}"


def chain(seed: Seed, rng: Random) -> str:
    """Many nodes one after the other, or one inside the other."""
    graph, count = seed.model.graph, rng.choice((50, 500, 2000))
    value = graph.output[0]
    name = value.name
    for i in range(count):
        graph.node.append(
            helper.make_node(
                rng.choice(("Tanh", "Identity", "Neg")) if i == 0 else graph.node[-1].op_type, [name], [f"chain_{i}"]
            )
        )
        name = f"chain_{i}"
    value.name = name
    return f"a chain of {count} nodes"


def nest(seed: Seed, rng: Random) -> str:
    """Branches in branches, deeper than a stack."""
    depth = rng.choice((3, 10, 20, 30, 31))
    value = seed.model.graph.output[0]
    graph = helper.make_graph(
        [helper.make_node("Identity", [value.name], ["deep"])], "g", [], [helper.make_value_info("deep", value.type)]
    )
    for level in range(depth):
        node = helper.make_node(
            "If",
            ["condition"],
            [f"deep_{level}"],
            then_branch=graph,
            else_branch=graph if depth < 9 else GraphProto(name="e"),
        )
        graph = helper.make_graph([node], "g", [], [helper.make_value_info(f"deep_{level}", value.type)])
    seed.model.graph.initializer.append(numpy_helper.from_array(_one(True), "condition"))
    seed.model.graph.node.append(graph.node[0])
    value.name = f"deep_{depth - 1}"
    return f"{depth} branches inside each other"


def values_at_edges(seed: Seed, rng: Random) -> str:
    """The numbers of a weight or a constant are others: infinite, negative, out of range, of no elements."""
    tensor = rng.choice(
        [t for t in _tensors(seed.model) if t.data_type not in (TensorProto.STRING, 0) and not t.external_data]
    )
    x = numpy_helper.to_array(tensor).copy()
    flat = x.reshape(-1)
    for _ in range(rng.choice((1, 1, 2, len(flat)))):
        where = rng.randrange(len(flat))
        with_ = rng.choice(hostile.FLOATS if x.dtype.kind == "f" else hostile.INTEGERS)
        flat[where] = (
            x.dtype.type(with_)
            if x.dtype.kind == "f"
            else x.dtype.type(with_ & 0x7F if x.dtype.itemsize == 1 else with_)
        )
    tensor.CopyFrom(numpy_helper.from_array(x, tensor.name))
    return f"numbers in {tensor.name[:40]!r}"


def duplicate_name(seed: Seed, rng: Random) -> str:
    """Two things have one name: inputs, outputs, weights, nodes, value_info, symbols."""
    graph = seed.model.graph
    named: list[Any] = [*graph.node, *graph.input, *graph.output, *graph.initializer, *graph.value_info]
    one, other = rng.choice(named), rng.choice(named)
    one.name = other.name
    return f"two things called {one.name[:40]!r}"


def to_constant(seed: Seed, rng: Random) -> str:
    """A weight lies in a Constant node, a sparse tensor, or is an input too."""
    graph = seed.model.graph
    where = rng.randrange(len(graph.initializer))
    tensor = TensorProto()
    tensor.CopyFrom(graph.initializer[where])
    how = rng.choice(("constant", "sparse", "input", "typed", "segment", "strings"))
    if how == "constant":
        del graph.initializer[where]
        graph.node.insert(0, helper.make_node("Constant", [], [tensor.name], value=tensor))
    elif how == "sparse":
        del graph.initializer[where]
        count = 1
        for size in tensor.dims:
            count *= size
        indices = numpy_helper.from_array(_one([rng.choice((0, count - 1, count, -1, 2**40))]), "")
        values = numpy_helper.from_array(_one([1.5]).astype("float32"), tensor.name)
        graph.sparse_initializer.add(values=values, indices=indices, dims=tensor.dims)
    elif how == "input":
        graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    elif how == "typed":
        x = numpy_helper.to_array(tensor)
        graph.initializer[where].CopyFrom(
            helper.make_tensor(tensor.name, tensor.data_type, x.shape, x.reshape(-1).tolist())
        )
    elif how == "segment":
        graph.initializer[where].segment.begin, graph.initializer[where].segment.end = 0, 1
    else:
        graph.initializer[where].CopyFrom(helper.make_tensor(tensor.name, TensorProto.STRING, [1], [b"\xff"]))
    return f"weight {tensor.name[:40]!r} is {how}"


def training_info(seed: Seed, rng: Random) -> str:
    """Training information that means little."""
    info = seed.model.training_info.add()
    names = [t.name for t in seed.model.graph.initializer] or ["w"]
    info.algorithm.CopyFrom(seed.model.graph)
    if rng.random() < 0.5:
        info.initialization.CopyFrom(seed.model.graph)
    info.update_binding.add(
        key=rng.choice((*names, hostile.string(rng))), value=rng.choice((*names, hostile.string(rng)))
    )
    if rng.random() < 0.5:
        operator = rng.choice(("Gradient", "Adam", "Momentum", "Adagrad"))
        names = [v.name for v in seed.model.graph.input]
        domain = "ai.onnx.preview.training"
        info.algorithm.node.append(
            helper.make_node(
                operator,
                names,
                ["g"],
                domain=domain,
                xs=names,
                y=rng.choice((seed.model.graph.output[0].name, "nowhere")),
                zs=[],
            )
        )
        seed.model.opset_import.add(domain=domain, version=1)
    return "training information"


def _nodes(graph: GraphProto) -> list[NodeProto]:
    inner = [node for top in graph.node for a in top.attribute if a.HasField("g") for node in _nodes(a.g)]
    return [*graph.node, *inner]


def _tensors(model: ModelProto) -> list[TensorProto]:
    return [*model.graph.initializer, *(a.t for node in _nodes(model.graph) for a in node.attribute if a.HasField("t"))]


def _one(value: Any) -> Any:
    return np.asarray(value)


MUTATIONS: tuple[Mutation, ...] = (
    rename_value, rename_value, rename_node, rename_node, external, external, external_again, declare, declare,
    resize, resize, retype, opset,
    set_attribute, set_attribute, rewire, rewire, in_function, function_bomb, in_if, in_loop, huge, chain, nest,
    values_at_edges, duplicate_name,
    to_constant, training_info,
)  # fmt: skip
