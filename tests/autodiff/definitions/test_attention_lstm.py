"""AttnLSTM beside onnxruntime's kernel and central differences."""

import numpy as np
import pytest

from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.passes.prepare import prepare
from onnxgrad_cli.record import Training
from tests.autodiff.definitions.test_contrib import FLOATS, case, check, narrowed, normal

DIRECTIONS = {"forward": 1, "reverse": 1, "bidirectional": 2}
SIZE, DEPTH, KEYS, STEPS = 4, 5, 3, 6
OUTPUTS = ("y", "last_h", "last_c")


def layer(given=True, projected=True, direction="forward", peepholes=None):
    n = DIRECTIONS[direction]
    width = 7 if projected else DEPTH
    return {
        "x": normal(3, 2, 3), "w": 0.5 * normal(n, 4 * SIZE, 3 + width), "r": 0.5 * normal(n, 4 * SIZE, SIZE),
        "b": normal(n, 8 * SIZE) if given else None, "lengths": None,
        "h": normal(n, 2, SIZE) if given else None, "c": 0.5 + normal(n, 2, SIZE) if given else None, "p": peepholes,
        "query": normal(n, SIZE, KEYS), "key": normal(n, DEPTH, KEYS), "score": normal(n, KEYS),
        "memory": normal(2, STEPS, DEPTH),
        "memory_lengths": np.array([6, 4], np.int32) if given else None,
        "output": 0.5 * normal(n, DEPTH + SIZE, width) if projected else None,
    }  # fmt: skip


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("projected", [False, True])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.thinned(4)
def test_attention_lstm(given, projected, direction):
    attributes = {"hidden_size": SIZE, "direction": direction}
    attributes |= {"activations": ["Sigmoid", "Tanh", "Tanh"] * DIRECTIONS[direction]} if given else {}
    check("AttnLSTM", layer(given, projected, direction), OUTPUTS, attributes, floats=FLOATS[:1])


@pytest.mark.parametrize(
    ("inputs", "attributes", "why"),
    [({}, {"clip": 1.0}, "a clip"), ({}, {"input_forget": 1}, "coupled gates"),
     ({"peepholes": normal(1, 3 * SIZE)}, {}, "peepholes"),
     ({}, {"activations": ["Sigmoid", "Relu", "Tanh"]}, "its activations are Sigmoid, Relu, Tanh")],
)  # fmt: skip
def test_other_forms_are_refused(inputs, attributes, why):
    model, _ = case("AttnLSTM", narrowed(layer(**inputs), np.float32), OUTPUTS, {"hidden_size": SIZE} | attributes, {})
    graph = Graph(model)
    prepare.normalise(graph)
    prepare.infer_and_lower(graph, Training())
    assert why in graph.unexpanded["node"]
