"""Drawings of large models are folded by modules, chains and neighbours."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import onnx
import pytest
from onnx import ModelProto, helper

from onnxgrad_cli.view import BoxKind, Drawing, draw, fold
from tests.cli_harness import MLP, UNKNOWN_OPS
from tests.view.test_drawing import BODIES, SAMPLES, by_title, count_nodes, model, shown, trained

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def models() -> dict[str, ModelProto]:
    """Every sample, training models of some, a model with bodies, one with operators that nobody knows."""
    found = {path.stem: onnx.load(path) for path in SAMPLES}
    for name in ("linear_regression", "digits_cnn", "tiny_transformer"):
        found[f"{name} training"] = trained(name)
    return {**found, "bodies": model(BODIES), "unknown": model(UNKNOWN_OPS), "mlp": model(MLP)}


@pytest.mark.parametrize("limit", [150, 60, 25, 8])
@pytest.mark.parametrize("name", ["tiny_transformer", "tiny_transformer training", "symbolic", "digits_cnn training"])
@pytest.mark.thinned(4)
def test_folding(name: str, limit: int, models: dict[str, ModelProto]) -> None:
    whole = draw(models[name])
    drawing = fold(whole, limit)
    folded = [box for box in drawing.boxes.values() if box.nodes > 1]
    assert sum(box.nodes > 0 for box in drawing.boxes.values()) <= limit
    assert shown(drawing) == shown(whole) == count_nodes(models[name].graph)
    assert all(re.match(rf"{box.nodes} nodes$", box.lines[0]) for box in folded)
    assert bool(folded) == (sum(box.nodes > 0 for box in whole.boxes.values()) > limit)
    assert ends(drawing) == ends(whole), "what depends on what"
    for kind in (BoxKind.INPUT, BoxKind.OUTPUT):
        assert by_title(drawing, kind) == by_title(whole, kind)
    hidden = sum(int(n) for box in folded for line in box.lines for n in re.findall(r"^(\d+) weights?$", line))
    assert len(by_title(drawing, BoxKind.WEIGHT)) + hidden == len(by_title(whole, BoxKind.WEIGHT))


def ends(drawing: Drawing) -> set[tuple[str, str]]:
    """Which output depends on which input, among those that are drawn."""
    after = defaultdict(set)
    for edge in drawing.edges:
        after[edge.source].add(edge.target)

    def reach(key: str, seen: set[str]) -> set[str]:
        for other in after[key] - seen:
            seen.add(other)
            reach(other, seen)
        return seen

    found = {key: box for key, box in drawing.boxes.items()}
    inputs = [box for box in found.values() if box.kind == BoxKind.INPUT]
    return {
        (box.title, found[key].title)
        for box in inputs
        for key in reach(box.key, set())
        if found[key].kind == BoxKind.OUTPUT
    }


def test_modules_are_known_by_weights_names_and_metadata() -> None:
    def titles(proto: ModelProto, depth: int) -> list[str]:
        return [box.title for box in fold(draw(proto), depth=depth).boxes.values() if box.nodes > 1]

    transformer = onnx.load(ROOT / "sample_models" / "tiny_transformer.onnx")
    assert {"layers.0", "layers.1"} < set(titles(transformer, 2))
    text = """
    <ir_version: 8, opset_import: ["": 17]> g (float[n] x) => (float[n] y)
    { a = Neg(x) b = Abs(a) c = Relu(b) y = Exp(c) }
    """
    names = model(text)
    for node, name in zip(names.graph.node, ("/a/one/Neg", "/a/two/Abs", "/b/Relu", "/b/Exp"), strict=True):
        node.name = name
    assert titles(names, 1) == ["a", "b"]
    assert titles(names, 2) == ["b"]
    scopes = model(text)
    for node, where in zip(scopes.graph.node, ("m", "m", "m.n", "m.n"), strict=True):
        node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=str(["", "m", where, "call"]))
    assert titles(scopes, 1) == ["m"] and titles(scopes, 2) == ["m", "m.n"]


def test_without_modules_chains_are_folded_then_neighbours() -> None:
    nodes = [helper.make_node("Relu", [f"v{i}"], [f"v{i + 1}"]) for i in range(200)]
    nodes += [helper.make_node("Neg", [f"v{i}"], [f"n{i}"]) for i in range(0, 201, 20)]
    outputs = [helper.make_tensor_value_info(f"n{i}", 1, [3]) for i in range(0, 201, 20)]
    graph = helper.make_graph(nodes, "chain", [helper.make_tensor_value_info("v0", 1, [3])], outputs)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    chains = fold(draw(proto), 30)
    assert "Relu … Relu" in by_title(chains, BoxKind.FORWARD)
    assert shown(chains) == 211 and ends(chains) == ends(draw(proto))
    runs = fold(draw(proto), 4)
    assert sum(box.nodes > 0 for box in runs.boxes.values()) <= 4 and shown(runs) == 211


def test_a_large_body_is_folded_inside() -> None:
    steps = "\n".join(f"s{i + 1} = Neg (s{i})" for i in range(300))
    text = f"""
    <ir_version: 8, opset_import: ["": 17]> g (float[n] x, bool c) => (float[n] y)
    {{ y = If (c) <then_branch = t () => (float[n] s300) {{ s0 = Relu (x) {steps} }},
                   else_branch = e () => (float[n] k) {{ k = Identity (x) }}> }}
    """
    drawing = fold(draw(model(text)))
    assert shown(drawing) == 303
    assert {"If", "Identity"} <= set(by_title(drawing, BoxKind.FORWARD)), "the branch is folded, not the If"
