"""Drawings of models: parts, values, bodies and colours; the Add example is that of onnxruntime-training."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper, parser

from onnxgrad_cli.builder import build
from onnxgrad_cli.compat.derivative_options import DerivativeOptions, onnx_derivative
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.options import Options
from onnxgrad_cli.view import Box, BoxKind, Cluster, Drawing, dot, draw, html
from onnxgrad_cli.view.drawing import LOOKS, boxes
from tests import pictures
from tests.cli_harness import MLP, UNKNOWN_OPS, save_external
from tests.pictures import dot_text, read_dot

ROOT = Path(__file__).parents[2]
SAMPLES = sorted((ROOT / "sample_models").glob("*.onnx"))
GOLDEN = Path(os.environ.get("ONNXGRAD_GOLDEN", ROOT.parent / "shared" / "golden"))

BODIES = """
<ir_version: 8, opset_import: ["": 17]>
bodies (float[n] x, bool c, float[n] w) => (float[n] y, float[n] z)
{
  y = If (c) <
    then_branch = yes () => (float[n] a) { t = Mul (x, w) a = Relu (t) },
    else_branch = no () => (float[n] b) { b = Neg (x) }
  >
  trips = Constant <value_int: int = 3> ()
  go = Constant <value: tensor = bool {1}> ()
  z = Loop (trips, go, y) <
    body = step (int64 i, bool on, float[n] s) => (bool still, float[n] u) {
      still = Identity (on)
      u = If (on) <then_branch = deep () => (float[n] d) { d = Add (s, w) },
                   else_branch = flat () => (float[n] e) { e = Identity (s) }>
    }
  >
}
"""


def model(text: str) -> ModelProto:
    return parser.parse_model(text)


def trained(name: str, **options: object) -> ModelProto:
    loss = "mse" if name == "linear_regression" else "cross-entropy"
    return build(onnx.load(ROOT / "sample_models" / f"{name}.onnx"), Options(losses=(LossSpec(loss),), **options)).model


def tags(proto: ModelProto, key: str) -> dict[str, str]:
    """Node name -> what its metadata say under a key."""
    found = ((node.name, {p.key: p.value for p in node.metadata_props}) for node in proto.graph.node)
    return {name: props[key] for name, props in found if key in props}


def count_nodes(graph: onnx.GraphProto) -> int:
    inner = (a.g for node in graph.node for a in node.attribute if a.type == onnx.AttributeProto.GRAPH)
    return len(graph.node) + sum(map(count_nodes, inner))


def shown(drawing: Drawing) -> int:
    """How many nodes the drawing shows or says it folded."""
    return sum(box.nodes for box in drawing.boxes.values()) + drawing.inline


def by_title(drawing: Drawing, kind: BoxKind) -> list[str]:
    return [box.title for box in drawing.boxes.values() if box.kind == kind]


# -- what is drawn --------------------------------------------------------------------------------------------------


def test_the_parts_of_a_training_model() -> None:
    proto = trained("digits_mlp")
    drawing = draw(proto)
    weights = [f"fc{i}.{part}" for i in (1, 2, 3) for part in ("weight", "bias")]
    assert by_title(drawing, BoxKind.INPUT) == ["x", "label"]
    assert by_title(drawing, BoxKind.WEIGHT) == weights
    assert by_title(drawing, BoxKind.GRADIENT) == [f"{name}_grad" for name in weights]
    assert by_title(drawing, BoxKind.OUTPUT) == ["loss"]
    assert by_title(drawing, BoxKind.FORWARD) == ["Flatten", "Gemm", "Relu", "Gemm", "Relu", "Gemm"]
    roles = tags(proto, "onnxgrad.role")
    drawn = {box.details.splitlines()[0]: box.kind for box in drawing.boxes.values() if box.nodes}
    assert {name: drawn[name] for name in roles} == {n: "backward" if r == "seed" else r for n, r in roles.items()}
    assert shown(drawing) == len(proto.graph.node)


def test_the_gradient_of_a_node_stands_beside_it() -> None:
    proto = trained("digits_mlp")
    frames: dict[str, set[str]] = {}

    def visit(group: Cluster) -> None:
        for part in group.parts:
            if isinstance(part, Cluster):
                if part.kind == BoxKind.BACKWARD:
                    assert group.beside and isinstance(group.parts[0], Box)
                    forward = group.parts[0].details.splitlines()[0]
                    assert part.title == f"gradient of {forward}" or "…" in part.title
                    frames[forward] = {box.details.splitlines()[0] for box in boxes(part)}
                visit(part)

    visit(draw(proto).root)
    expected = defaultdict(set)
    for name, forward in tags(proto, "onnxgrad.forward").items():
        expected[forward].add(name)
    assert frames == expected


def test_an_optimizer_and_its_state() -> None:
    drawing = draw(trained("linear_regression", optimizer="adam"))
    assert by_title(drawing, BoxKind.OPTIMIZER)
    states = by_title(drawing, BoxKind.STATE)
    fed = [box for box in drawing.boxes.values() if box.kind == BoxKind.STATE and not reached(drawing, box)]
    assert fed and len(states) > len(fed), "what comes in, and what goes out"


def reached(drawing: Drawing, box: Box) -> bool:
    return any(edge.target == box.key for edge in drawing.edges)


def test_values_types_and_constants() -> None:
    drawing = draw(onnx.load(ROOT / "sample_models" / "tiny_transformer.onnx"))
    lines = {box.title: box.lines for box in drawing.boxes.values()}
    assert lines["input_ids"] == ("int64[batch, sequence]",)
    assert lines["layers.0.fc1.weight"] == ("float[64, 32]",)
    assert lines["Squeeze"][0] == "axes = [0]", "a constant stands at the operand, by the operand's name"
    div = next(box for box in drawing.boxes.values() if box.title == "Div")
    assert div.lines[0] == "B = 2.82843"
    assert BoxKind.CONSTANT not in drawing.kinds


def test_nodes_that_stand_before_what_they_read() -> None:
    """They are drawn in the order in which they run, a body with its own."""
    text = """<ir_version: 8, opset_import: ["": 17]> g (float[2] x, bool c) => (float[2] y) {
        y = Relu(h)
        h = If(c) <then_branch = a () => (float[2] u) { u = Neg(x) }, else_branch = b () => (float[2] v) { v = Abs(x) }>
    }"""
    drawing = draw(parser.parse_model(text))
    box = {box.title: box for box in drawing.boxes.values()}
    assert {"Relu", "If", "Neg", "Abs"} <= box.keys()
    assert reached(drawing, box["Relu"])


def test_large_constants_have_a_box() -> None:
    tensor = onnx.numpy_helper.from_array(np.arange(40, dtype=np.int64), "table")
    node = helper.make_node("Constant", [], ["other"], value=onnx.numpy_helper.from_array(np.zeros(40, np.float32)))
    x, y, z = (helper.make_tensor_value_info(n, t, [40]) for n, t in (("x", 7), ("y", 7), ("z", 1)))
    graph = helper.make_graph(
        [node, helper.make_node("Add", ["x", "table"], ["y"]), helper.make_node("Neg", ["other"], ["z"])],
        "constants", [x], [y, z], [tensor],
    )  # fmt: skip
    drawing = draw(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]))
    assert by_title(drawing, BoxKind.CONSTANT) == ["table", "other"]
    assert shown(drawing) == 3


def test_bodies_are_nested_frames() -> None:
    drawing = draw(model(BODIES))
    frames: dict[str, Cluster] = {}

    def visit(group: Cluster, depth: int) -> None:
        for part in group.parts:
            if isinstance(part, Cluster):
                if part.container:
                    frames[f"{depth} {part.title}"] = part
                visit(part, depth + part.container)

    visit(drawing.root, 1)
    assert set(frames) == {
        "1 then_branch of If", "1 else_branch of If", "1 body of Loop", "2 then_branch of If", "2 else_branch of If",
    }  # fmt: skip
    within = [box.title for box in boxes(frames["1 then_branch of If"])]
    assert within == ["Mul", "Relu", "a"]
    w = next(box for box in drawing.boxes.values() if box.title == "w")
    readers = {drawing.boxes[edge.target].title for edge in drawing.edges if edge.source == w.key}
    assert readers == {"Mul", "Add"}, "what a body reads from outside goes through its frame"
    assert shown(drawing) == count_nodes(model(BODIES).graph)
    assert drawing.inline == 2


def test_any_model() -> None:
    assert by_title(draw(model(UNKNOWN_OPS)), BoxKind.FORWARD) == ["Add", "my.ops.Twirl", "my.ops.Swirl"]


def test_nodes_of_one_name_are_two() -> None:
    proto = model(MLP)
    for node in proto.graph.node:
        node.name = "same"
    assert [type(part) for part in draw(proto).root.parts] == [Box] * 9


def test_a_description_that_can_not_be_read_is_no_obstacle() -> None:
    proto = model(MLP)
    for text in ("{", "[]", '{"inputs": 3}', '{"outputs": {"y": 1}}', "[" * 100_000):
        del proto.metadata_props[:]
        proto.metadata_props.add(key="onnxgrad.roles", value=text)
        assert by_title(draw(proto), BoxKind.WEIGHT) == ["w1", "b1", "w2"]


def test_weights_are_not_read(tmp_path: Path) -> None:
    path = save_external(tmp_path / "m.onnx")  # its data file is not there
    drawing = draw(onnx.load(path, load_external_data=False), path)
    assert [box.lines for box in drawing.boxes.values() if box.kind == BoxKind.WEIGHT] == [("float[8, 3]",)]


# -- folding --------------------------------------------------------------------------------------------------------


# -- the formats ----------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """An HTML page: every element closed, nothing fetched, no more scripts than the page's own three."""

    VOID = frozenset({"meta", "br", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open
        assert self.seen.count("script") == 3

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = dict(attrs)
        assert tag not in ("link", "img", "iframe", "object")
        assert not {"href", "src", "style"} & names.keys() and not any(name.startswith("on") for name in names)
        self.seen.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def says(box: Box) -> str:
    return "\n".join([box.title, *box.lines])


def check_formats(drawing: Drawing) -> None:
    """Each format holds the boxes with their texts and looks, and the edges."""
    edges = {(edge.source, edge.target) for edge in drawing.edges}
    legend = {f"legend_{kind}" for kind in drawing.kinds}

    nodes, pairs = read_dot(dot(drawing))
    assert {key: dot_text(given["label"]) for key, given in nodes.items() if key not in legend} == {
        key: says(box) for key, box in drawing.boxes.items()
    }
    assert nodes.keys() - drawing.boxes.keys() == legend
    assert set(pairs) == edges and len(pairs) == len(edges)
    for key, box in drawing.boxes.items():
        assert nodes[key]["fillcolor"] == f'"{LOOKS[box.kind].fill}"'

    page = html(drawing)
    assert Page(page).seen.count("svg") == 1
    assert re.findall(r"https?://[^\s\"<']*", page) == ["http://www.w3.org/2000/svg"]


WEIRD = [
    'quo"te', "back\\slash\\N", "a/b:c", "[x]", "<b>&amp;</b>", "{h}|`i`", "#quot;", "_x_ *y* ~z~", "1. list", "- item",
    "漢字 é", "line\nbreak\t", "</title><script>alert(1)</script>", "end", "-->", "%%", "]]>", '"]; n0 -> n1; x["',
]  # fmt: skip


# -- how it looks ---------------------------------------------------------------------------------------------------


def rgb(color: str) -> np.ndarray:
    """Linear light of an sRGB colour (IEC 61966-2-1)."""
    c = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def lab(linear: np.ndarray) -> np.ndarray:
    """CIE L*a*b* of linear sRGB, at D65."""
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    f = np.cbrt(np.clip(to_xyz @ linear / [0.9505, 1, 1.089], 1e-4, None))
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


SIGHT = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
"""What is seen of linear light (G. Machado, M. Oliveira, L. Fernandes, IEEE TVCG 15, 2009, severity 1)."""


@pytest.mark.parametrize("sight", SIGHT)
def test_colours_are_told_apart(sight: str) -> None:
    colours = {look.fill for look in LOOKS.values()}
    assert len(colours) == 8, "values that come in and go out of one part share a colour"
    for a, b in itertools.combinations(sorted(colours), 2):
        seen = [lab(np.clip(np.array(SIGHT[sight]) @ rgb(c), 0, 1)) for c in (a, b)]
        assert np.linalg.norm(seen[0] - seen[1]) > 10, (a, b)


def test_looks_differ_without_colour() -> None:
    assert LOOKS.keys() == set(BoxKind)
    assert len({(look.shape, look.border) for look in LOOKS.values()}) == len(LOOKS)


def test_text_can_be_read() -> None:
    weights = np.array([0.2126, 0.7152, 0.0722])
    for look in LOOKS.values():
        assert (weights @ rgb(look.fill) + 0.05) / (weights @ rgb("#111111") + 0.05) > 4.5, "WCAG 2.2, level AA"


# -- the command ----------------------------------------------------------------------------------------------------


def test_the_same_again_in_another_process(tmp_path: Path) -> None:
    onnx.save(trained("digits_cnn"), tmp_path / "train.onnx")
    code = "import sys, onnx; from onnxgrad_cli.view import *; d = fold(draw(onnx.load(sys.argv[1])), 30); "
    code += "sys.stdout.write(dot(d) + html(d))"
    texts = [
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "train.onnx")],
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert texts[0] == texts[1] and len(texts[0]) > 10_000


def test_nothing_heavy_is_imported_for_help() -> None:
    code = "import sys; from onnxgrad_cli.cli import run; run(['view', '--help']); sys.exit('onnx' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0


# -- the pictures of the older documentation -----------------------------------------------------------------------


def test_the_pictures_of_the_page_are_fresh() -> None:
    found = list(pictures.drawn())
    assert len(found) == 7
    for picture, text in found:
        assert pictures.is_fresh(picture, text), f"{picture} is old: python -m tests.pictures"


OLDER = {
    "yield": (None, DerivativeOptions.KeepYieldOp),
    "zero": (None, DerivativeOptions.Zero),
    "keep": (None, DerivativeOptions.KeepOutputs),
    "keepfill": (None, DerivativeOptions.KeepOutputs | DerivativeOptions.FillGrad),
    "w_empty_yield": ([], DerivativeOptions.KeepYieldOp),
    "w_empty_zero": ([], DerivativeOptions.Zero),
    "w_empty_keep": ([], DerivativeOptions.KeepOutputs),
    "w_empty_keepfill": ([], DerivativeOptions.KeepOutputs | DerivativeOptions.FillGrad),
    "w_list_zero": (["Ad_Addcst"], DerivativeOptions.Zero),
}


@pytest.mark.parametrize("case", OLDER)
def test_the_add_example_is_connected_as_by_onnxruntime_training(case: str) -> None:
    if not GOLDEN.is_dir():
        pytest.skip(f"the graphs of onnxruntime-training are not here: set ONNXGRAD_GOLDEN ({GOLDEN})")
    weights, options = OLDER[case]
    add = onnx.load(ROOT / "sample_models" / "add.onnx")
    ours = onnx_derivative(add, weights=weights, options=options)
    theirs = onnx.load(GOLDEN / f"add.{case}.onnx")
    assert structure(ours) == structure(theirs)


SEEDS = {"Shape", "ConstantOfShape", "com.microsoft.YieldOp"}
"""What makes the cotangent of Y; theirs carry no mark."""


def structure(proto: ModelProto) -> dict[str, object]:
    """What a gradient graph is, but for the nodes that a gradient is written with."""
    drawing = draw(proto)
    check_formats(drawing)
    found = drawing.boxes
    after = defaultdict(set)
    for edge in drawing.edges:
        after[edge.source].add(edge.target)

    def reach(key: str) -> set[str]:
        return {key}.union(*map(reach, after[key]))

    def of(*kinds: BoxKind) -> list[Box]:
        return [box for box in found.values() if box.kind in kinds]

    cotangents = [e.source for e in drawing.edges if any(t.partition(":")[0] == "Y_grad" for t in e.tensors)]
    fed = [box for box in of(BoxKind.INPUT, BoxKind.WEIGHT) if box.title != "Y_grad"]
    gradients = of(BoxKind.GRADIENT)
    return {
        "inputs": [value.name for value in proto.graph.input],
        "outputs": [box.title for box in of(BoxKind.GRADIENT, BoxKind.OUTPUT)],
        "forward nodes": [box.details.splitlines()[0] for box in of(BoxKind.FORWARD) if box.title not in SEEDS],
        "seeds": [box.title for box in found.values() if box.title in SEEDS - {"Shape"}],
        "gradients that come from the cotangent": [
            b.title for b in gradients if any(b.key in reach(c) for c in cotangents)
        ],
        "what outputs come from": {
            (a.title, b.title) for a in fed for b in of(BoxKind.OUTPUT) if b.key in reach(a.key)
        },
        # the gradient of X alone is the cotangent itself, which they sum over no axis
        "frames": {frame.title for frame in frames(drawing.root)} if len(gradients) > 1 else set(),
    }


def frames(group: Cluster) -> list[Cluster]:
    inner = [part for part in group.parts if isinstance(part, Cluster)]
    return [*(g for g in inner if g.title), *(f for g in inner for f in frames(g))]
