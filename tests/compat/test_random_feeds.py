"""random_feed: every element type and rank, sizes, seeds, and data that onnxruntime takes as they are."""

import numpy as np
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, ValueInfoProto, helper, numpy_helper

from onnxgrad_cli.compat import random_feed
from onnxgrad_cli.errors import UsageError
from tests.facts import raises

TYPES = [t for t in TensorProto.DataType.values() if t != TensorProto.UNDEFINED]
LOADED = "FLOAT DOUBLE FLOAT16 INT8 INT16 INT32 INT64 UINT8 UINT16 UINT32 UINT64 BOOL STRING".split()
"""The element types that onnxruntime takes from numpy."""


def value(name: str, shape: list[int | str | None] | None, dtype: int = TensorProto.FLOAT) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def model(inputs: list[ValueInfoProto], nodes=None, initializers=()) -> ModelProto:
    nodes = nodes or [helper.make_node("Identity", [v.name], [f"{v.name}_out"]) for v in inputs]
    outputs = [helper.make_empty_tensor_value_info(name) for node in nodes for name in node.output]
    graph = helper.make_graph(nodes, "g", inputs, outputs, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def session(proto: ModelProto) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("dtype", TYPES, ids=TensorProto.DataType.Name)
def test_every_element_type_at_every_rank(dtype: int) -> None:
    for shape in ([], [None], ["n", 3], [2, "m", 4]):
        found = random_feed([value("x", shape, dtype)], seed=0)["x"]
        expected = [[], [10], [10, 3], [2, 1, 4]][len(shape)]
        assert isinstance(found, np.ndarray)
        assert list(found.shape) == expected
        assert found.dtype == helper.tensor_dtype_to_np_dtype(dtype)
        numbers = found.astype(np.complex128 if found.dtype.kind == "c" else np.float64)
        assert np.isfinite(numbers).all()
    several = random_feed([value("x", [50], dtype)], seed=0)["x"]
    assert len(set(map(str, several.tolist()))) > 1


def test_floats_are_normal_and_integers_0_or_1() -> None:
    found = random_feed([value("x", [20_000]), value("i", [1000], TensorProto.UINT8)], seed=0)
    assert abs(found["x"].mean()) < 0.05
    assert abs(found["x"].std() - 1) < 0.05
    assert set(found["i"].tolist()) == {0, 1}
    assert set(random_feed([value("s", [100], TensorProto.STRING)], seed=0)["s"]) == {"0", "1"}


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ([], ()),
        ([None], (4,)),  # the older function gave (0,)
        ([0], (4,)),
        ([-1, -1], (4, 2)),
        (["n", None], (4, 2)),
        ([0, 5], (4, 5)),
        ([3, 0], (3, 0)),
        ([7, "m", None], (7, 2, 2)),
        (["n", "n"], (4, 4)),
        ([3, "n"], (3, 2)),
    ],
)
def test_sizes(shape: list[int | str | None], expected: tuple[int, ...]) -> None:
    found = random_feed([value("x", shape)], batch=4, empty_dimension=2)
    assert found["x"].shape == expected


def test_equal_symbols_are_equal_sizes_across_inputs() -> None:
    found = random_feed([value("mask", [1, "n", "t"]), value("x", ["n", "t"]), value("y", ["n"])], batch=4)
    assert {name: x.shape for name, x in found.items()} == {"mask": (1, 4, 1), "x": (4, 1), "y": (4,)}


def test_seeds() -> None:
    inputs = [value("x", ["n", 3]), value("y", ["n"])]
    first, again, other = (random_feed(inputs, seed=seed) for seed in (1, 1, 2))
    assert list(first) == ["x", "y"]
    for name in first:
        np.testing.assert_array_equal(first[name], again[name])
        assert (first[name] != other[name]).any()
    rng = np.random.default_rng(1)
    np.testing.assert_array_equal(random_feed(inputs, seed=rng)["x"], first["x"])
    assert (random_feed(inputs, seed=rng)["x"] != first["x"]).any()
    assert (random_feed(inputs)["x"] != random_feed(inputs)["x"]).any()


@pytest.mark.parametrize("kind", LOADED)
def test_onnxruntime_takes_the_feed_of_its_own_inputs(kind: str) -> None:
    dtype = TensorProto.DataType.Value(kind)
    proto = model([value("a", [], dtype), value("b", ["n"], dtype), value("c", ["n", None, 3], dtype)])
    run = session(proto)
    feeds = random_feed(run.get_inputs(), batch=5, seed=0)
    assert {name: x.shape for name, x in feeds.items()} == {"a": (), "b": (5,), "c": (5, 1, 3)}
    for found, fed in zip(run.run(None, feeds), feeds.values(), strict=True):
        np.testing.assert_array_equal(found, fed)
    for other in (random_feed(proto, 5, seed=0), random_feed(proto.graph.input, 5, seed=0)):
        for name, x in other.items():
            np.testing.assert_array_equal(x, feeds[name])


@pytest.mark.parametrize("kind", ["BFLOAT16", "FLOAT8E4M3FN", "FLOAT8E5M2"])
def test_types_that_numpy_does_not_have_are_read_from_a_session(kind: str) -> None:
    dtype = TensorProto.DataType.Value(kind)
    nodes = [helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT)]
    proto = model([value("x", ["n"], dtype)], nodes)
    proto.opset_import[0].version, proto.ir_version = 19, 9
    (found,) = random_feed(session(proto).get_inputs(), batch=3).values()
    assert (found.shape, found.dtype) == ((3,), helper.tensor_dtype_to_np_dtype(dtype))


def test_integers_are_valid_as_what_they_index() -> None:
    table = numpy_helper.from_array(np.zeros((2, 7), np.float32), "table")
    nodes = [
        helper.make_node("Gather", ["table", "columns"], ["a"], axis=-1),
        helper.make_node("Gather", ["table", "rows"], ["b"]),
        helper.make_node("GatherElements", ["x", "elements"], ["c"], axis=1),
        helper.make_node("Gather", ["single", "only"], ["d"]),
    ]
    inputs = [
        value("columns", ["n"], TensorProto.INT64),
        value("rows", ["n"], TensorProto.INT32),
        value("x", ["n", 5]),
        value("elements", ["n", "k"], TensorProto.INT64),
        value("single", [1, 3]),
        value("only", ["n"], TensorProto.INT64),
    ]
    proto = model(inputs, nodes, [table])
    feeds = random_feed(proto, batch=200, empty_dimension=4, seed=0)
    drawn = {name: set(feeds[name].ravel().tolist()) for name in ("columns", "rows", "elements", "only")}
    assert drawn == {"columns": set(range(7)), "rows": {0, 1}, "elements": set(range(5)), "only": {0}}
    session(proto).run(None, feeds)


def test_inputs_with_an_initializer_are_left_out() -> None:
    weight = numpy_helper.from_array(np.zeros(3, np.float32), "w")
    proto = model([value("x", ["n", 3]), value("w", [3])], [helper.make_node("Add", ["x", "w"], ["y"])], [weight])
    assert list(random_feed(proto)) == ["x"]


def test_what_is_no_tensor_is_refused() -> None:
    tensor = helper.make_tensor_type_proto(TensorProto.FLOAT, [2])
    sequence = helper.make_value_info("s", helper.make_sequence_type_proto(tensor))
    optional = helper.make_value_info("o", helper.make_optional_type_proto(tensor))
    with raises(UsageError, "wrong_type", "s"):
        random_feed([sequence])
    with raises(UsageError, "wrong_type", "o"):
        random_feed([optional])
    nodes = [helper.make_node("SequenceLength", ["s"], ["n"])]
    with raises(UsageError, "wrong_type", "s"):
        random_feed(session(model([sequence], nodes)).get_inputs())
    with raises(UsageError, "wrong_shape", "x"):
        random_feed([value("x", None)])
    with raises(UsageError, "wrong_type", "x"):
        random_feed([ValueInfoProto(name="x")])


@pytest.mark.parametrize("sizes", [{"batch": -1}, {"batch": 2.5}, {"empty_dimension": "a"}, {"batch": True}])
def test_sizes_that_are_none(sizes: dict[str, object]) -> None:
    ((argument, size),) = sizes.items()
    with raises(UsageError, "wrong_value", f"{argument}={size!r}", "0"):
        random_feed([value("x", ["n"])], **sizes)
