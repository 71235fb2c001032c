"""The values that recurrent layers read, found from the nodes of a model."""

from onnx import parser

from onnxgrad_cli.data.states import recurrent_values


def test_a_deep_residual_network_before_a_layer_is_walked_once() -> None:
    """Each block doubles the number of paths."""
    blocks = " ".join(f"t{i} = Tanh(x{i}) x{i + 1} = Add(x{i}, t{i})" for i in range(60))
    model = parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17]>
        g (float[6, N, 3] x0, float[1, N, 4] h) => (float[6, 1, N, 4] y)
        {{ {blocks} s = Identity(h) y = GRU<hidden_size = 4>(x60, w, u, , , s) }}""")
    found = recurrent_values(model.graph.node)
    assert found.states == {"s", "h"}
    assert {"x0", "x60"} <= found.sequences and "w" not in found.sequences


def test_a_sequence_that_is_transposed_or_has_its_batch_first_is_none() -> None:
    model = parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        g (float[N, 6, 3] x, float[N, 6, 3] z) => (float[6, 1, N, 4] y, float[N, 6, 1, 4] v)
        { t = Transpose<perm = [1, 0, 2]>(x) y = GRU<hidden_size = 4>(t, w, u)
          v = GRU<hidden_size = 4, layout = 1>(z, w, u) }""")
    assert recurrent_values(model.graph.node).sequences == {"t"}
