"""Sizes that are tried for symbols of inputs."""

import onnx

from onnxgrad_cli.execution.sizes import MOST_ELEMENTS, SIZES, sized, sizes_to_try

EMPTY = onnx.ModelProto()


def test_what_leads_is_a_batch_and_the_rest_grows() -> None:
    found = list(sizes_to_try({"x": ("batch", 3, "h", "w")}, EMPTY))
    assert [tuple(sizes.values()) for sizes in found] == [(2, size, size) for size in SIZES]


def test_a_symbol_may_be_the_sum_of_others_and_the_past_may_be_empty() -> None:
    whole = "past_sequence_length + sequence_length"
    shapes = {"ids": ("batch", "sequence_length"), "mask": ("batch", whole), "k": ("batch", "past_sequence_length", 4)}
    first, second, *_ = sizes_to_try(shapes, EMPTY)
    assert first == {"batch": 2, "sequence_length": 8, "past_sequence_length": 8, whole: 16}
    assert second == {"batch": 2, "sequence_length": 8, "past_sequence_length": 0, whole: 8}
    first = next(sizes_to_try({"a": (1, "past_n", "n"), "b": (1, "total_n")}, EMPTY))
    assert first == {"past_n": 8, "n": 8, "total_n": 16}


def test_sizes_that_are_left_behind_in_a_file_come_last() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 20]> g (float[N, L] x) => (float y)'
        "<int64[2] s = {-1, 21}> { y = Reshape(x, s) }"
    )
    *_, last = sizes_to_try({"x": ("N", "L")}, model)
    assert last == {"N": 2, "L": 21}


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


def test_matrices_that_must_be_square_are_so() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 20]> g (float[N, M] x) => (float y) { y = Det(x) }'
    )
    assert [set(sizes.values()) for sizes in sizes_to_try({"x": ("N", "M")}, model)] == [{8}, {16}]
