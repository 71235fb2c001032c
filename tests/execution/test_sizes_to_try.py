"""Sizes that are tried for symbols of inputs."""

import onnx
import pytest

from onnxgrad_cli.execution.sizes_to_try import MOST_ELEMENTS, OF_IMAGES, SIZES, sized, sizes_to_try, switch_values

EMPTY = onnx.ModelProto()


def test_what_leads_is_a_batch_and_the_rest_grows() -> None:
    found = list(sizes_to_try({"x": ("batch", 3, "h", "w")}, EMPTY, ones=False))
    assert [tuple(sizes.values()) for sizes in found] == [(2, size, size) for size in (*SIZES, *OF_IMAGES)]
    signals = list(sizes_to_try({"x": ("batch", "time")}, EMPTY, ones=False))
    assert [sizes["time"] for sizes in signals] == [*SIZES, *OF_IMAGES, 512, 1024]


def test_1_is_tried_for_each_symbol_after_small_sizes_and_before_large_ones() -> None:
    """Each candidate comes once."""
    found = [tuple(sizes.values()) for sizes in sizes_to_try({"x": ("batch", 3, "h", "w")}, EMPTY)]
    ones = [*((1, size, size) for size in SIZES), (2, 1, 8), (2, 8, 1), (1, 1, 1), (1, 1, 8), (1, 8, 1)]
    alike = [(size, size, size) for size in SIZES]
    assert found[len(SIZES) : -2 * len(OF_IMAGES)] == [*alike, *ones]
    assert found[-2:] == [(2, 224, 224), (1, 224, 224)]
    assert list(sizes_to_try({"x": ("batch", 3)}, EMPTY)) == [{"batch": 2}, {"batch": 1}]


def test_a_symbol_may_be_the_sum_of_others_and_the_past_may_be_empty() -> None:
    whole = "past_sequence_length + sequence_length"
    shapes = {"ids": ("batch", "sequence_length"), "mask": ("batch", whole), "k": ("batch", "past_sequence_length", 4)}
    first, second, *_ = sizes_to_try(shapes, EMPTY)
    assert first == {"batch": 2, "sequence_length": 8, "past_sequence_length": 8, whole: 16}
    assert second == {"batch": 2, "sequence_length": 8, "past_sequence_length": 0, whole: 8}
    first = next(sizes_to_try({"a": (1, "past_n", "n"), "b": (1, "total_n")}, EMPTY))
    assert first == {"past_n": 8, "n": 8, "total_n": 16}


@pytest.mark.parametrize(
    ("nodes", "size"),
    [
        ("<int64[2] s = {-1, 21}> { y = Reshape(x, s) }", 21),
        ("{ n = Constant<value = int64[1] {20}>() s = Concat<axis = 0>(n, m) y = Reshape(x, s) }", 20),
        ("<float[3] b = {1, 2, 3}> { y = Add(x, b) }", 3),
        ("<float[4, 1] w = {1, 2, 3, 4}> { y = MatMul(x, w) }", 4),
        ("<float[1, 7] w = {1, 2, 3, 4, 5, 6, 7}> { y = Gemm<transB = 1>(x, w) }", 7),
    ],
)
def test_sizes_that_a_file_has_left_behind_or_demands_are_tried(nodes: str, size: int) -> None:
    text = '<ir_version: 10, opset_import: ["" : 20]> g (float[N, L] x, int64[1] m) => (float y)'
    found = list(sizes_to_try({"x": ("N", "L")}, onnx.parser.parse_model(text + nodes), ones=False))
    assert found[len(SIZES) :] == [{"N": 2, "L": each} for each in (size, *OF_IMAGES, 512, 1024)]


def test_large_sizes_that_a_file_has_left_behind_are_tried_in_the_order_of_cost() -> None:
    text = '<ir_version: 10, opset_import: ["" : 20]> g (float[N, L] x) => (float y) <int64[3] s = {-1, 21, 160}> {'
    model = onnx.parser.parse_model(f"{text} y = Reshape(x, s) }}")
    found = list(sizes_to_try({"x": ("N", "L")}, model, ones=False))
    assert [sizes["L"] for sizes in found] == [*SIZES, 21, 128, 160, 224, 512, 1024]


def test_no_array_of_gigabytes_is_drawn() -> None:
    for sizes in sizes_to_try({"x": ("n", "a", "b", "c", "d")}, EMPTY):
        assert sizes["n"] * sizes["a"] * sizes["b"] * sizes["c"] * sizes["d"] <= MOST_ELEMENTS


def test_sizes_apart_come_before_those_that_are_alike() -> None:
    shapes = {"x": ("n", "c", "?"), "z": ("m", "c", 3)}
    found = [sized(shapes, sizes) for sizes in sizes_to_try(shapes, EMPTY, apart=True)]
    assert found[:3] == [
        {"x": [2, 8, 16], "z": [3, 8, 3]},
        {"x": [2, 8, 8], "z": [3, 8, 3]},
        {"x": [2, 8, 8], "z": [2, 8, 3]},
    ]
    assert sized(shapes, {"n": 5}) == {"x": [5, 2, 2], "z": [2, 2, 3]}


def test_a_batch_of_states_is_small_first() -> None:
    """A node of a graph, on both axes of one input, is none."""
    shapes = {"sound": ("batch", "time"), "state": (2, "batch", 128)}
    found = [(sizes["batch"], sizes["time"]) for sizes in sizes_to_try(shapes, EMPTY)]
    assert found[:4] == [(2, 8), (8, 8), (2, 16), (16, 16)]
    assert found.index((2, 224)) < found.index((128, 128)) < found.index((224, 224))
    assert next(sizes_to_try({"x": ("n", 16), "adjacency": ("n", "n")}, EMPTY)) == {"n": 8}


def test_matrices_that_must_be_square_are_so() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 20]> g (float[N, M] x) => (float y) { y = Det(x) }'
    )
    assert [set(sizes.values()) for sizes in sizes_to_try({"x": ("N", "M")}, model)] == [{8}, {16}]


def test_a_batch_without_a_name_is_small_in_states_too() -> None:
    found = list(sizes_to_try({"audio": ("?", "?"), "state": (2, "?", 128)}, EMPTY))
    assert {"audio/0": 2, "audio/1": 512, "state/1": 2} in found


def test_a_switch_is_the_integer_that_it_is_compared_with() -> None:
    """Not so tokens, nor what is compared with another value."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 20]>
    g (int64 rate, int64 other, int64[n] tokens) => (bool a, bool b, bool[n] c) <int64 wide = {16000}> {
      a = Equal(wide, rate) b = Equal(other, rate) c = Equal(tokens, wide)
    }""")
    assert switch_values(model) == {"rate": 16000}
