"""The page of HTML that a drawing becomes: what it holds, that it lets nothing else run, and how it is to use."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper, numpy_helper

from onnxgrad_cli import LossSpec, Options, build
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.jobs.build import run_build
from onnxgrad_cli.jobs.train import Course, run_train
from onnxgrad_cli.jobs.view import run_view
from onnxgrad_cli.view import BoxKind, Drawing, draw
from onnxgrad_cli.view.html_drawing import FOLDER, html
from onnxgrad_cli.view.tree import Branch, tree
from tests.facts import raises
from tests.view.test_drawing import WEIRD
from tests.web import javascript

SAMPLES = Path(__file__).parents[2] / "sample_models"
DAGRE = "54a503e346f93ca0bb10abe7999587e037262935687aca45eb4e4b0f64bbb578"
"""The SHA-256 of dagre.min.js of @dagrejs/dagre 3.1.3."""


def training(name: str) -> ModelProto:
    return build(onnx.load(SAMPLES / f"{name}.onnx"), Options(losses=(LossSpec("cross-entropy"),))).model


def chain(count: int, *, scoped: bool = False) -> ModelProto:
    """Nodes one after the other, every fifth with a weight of its own, every fiftieth with a value of long before."""
    nodes, weights, last = [], [], "x"
    for i in range(count):
        second = [f"v{i - 49}"] if i % 50 == 49 else [f"w{i}"] if i % 5 == 4 else []
        weights += [numpy_helper.from_array(np.ones(32, np.float32), name) for name in second if name.startswith("w")]
        name = f"/model/layers.{i // 1000}/block.{i // 50 % 20}/op{i % 50}" if scoped else f"node{i}"
        nodes.append(helper.make_node("Mul" if second else "Relu", [last, *second], [f"v{i}"], name=name))
        last = f"v{i}"
    ends = [helper.make_tensor_value_info(name, 1, ["n", 32]) for name in ("x", last)]
    graph = helper.make_graph(nodes, f"chain of {count}", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def walk(branch: Branch) -> list[Branch]:
    return [branch, *(each for child in branch.children for each in walk(child))]


def read(page: str) -> dict[str, Any]:
    """The data in a page."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


@pytest.fixture(scope="module")
def drawings() -> list[Drawing]:
    """The samples, a training model, and chains with and without modules."""
    models = [onnx.load(path) for path in sorted(SAMPLES.glob("*.onnx"))]
    return list(map(draw, [*models, training("digits_cnn"), chain(700), chain(700, scoped=True)]))


def test_values_stand_with_all_that_they_touch(drawings: list[Drawing]) -> None:
    """A weight of one module is in it, or in a part of it; inputs and outputs stand outside all modules."""
    whole = tree(draw(training("digits_cnn")))
    module = next(branch for branch in walk(whole) if branch.title == "bn1")
    inside = {branch.box.title for branch in walk(module) if branch.box}
    assert {"bn1.weight", "bn1.bias_grad", "BatchNormalization", "Relu"} <= inside and "conv1.weight" not in inside
    for drawing in drawings:
        top = [branch.box for branch in tree(drawing).children if branch.box]
        ends = [box for box in drawing.boxes.values() if box.kind in (BoxKind.INPUT, BoxKind.OUTPUT)]
        assert all(box in top for box in ends)


def test_the_page_holds_the_drawing(drawings: list[Drawing]) -> None:
    for drawing in drawings:
        data = read(html(drawing))
        kinds = [kind["name"] for kind in data["kinds"]]
        shown = [(kinds[item[1]], item[2], *item[3], item[4]) for item in data["items"] if item[1] >= 0]
        assert sorted(shown) == sorted((b.kind, b.title, *b.lines, b.details) for b in drawing.boxes.values())
        assert all(item[0] < i for i, item in enumerate(data["items"]))
        titles = [item[2] for item in data["items"]]
        boxes = drawing.boxes
        assert [(titles[a], titles[b], *tensors) for a, b, *tensors in data["edges"]] == (
            [(boxes[edge.source].title, boxes[edge.target].title, *edge.tensors) for edge in drawing.edges]
        )


def test_rules_are_told() -> None:
    rules = read(html(draw(training("digits_cnn"))))["rules"]
    assert rules["Relu"] == "onnxgrad_cli.autodiff.rules.activation.relu; 0 at x = 0"
    nodes = [helper.make_node("Floor", ["x"], ["y"]), helper.make_node("What", ["y"], ["z"], domain="a.b")]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", 1, [1])], [])
    assert read(html(draw(helper.make_model(graph))))["rules"] == {"Floor": "zero by mathematics", "a.b.What": ""}


def hashed(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_nothing_but_the_page_own_scripts_may_run() -> None:
    """The policy names the style and the scripts by their hashes; names of a model are data, and can't end it."""
    nodes, last = [], "in"
    for i, name in enumerate(WEIRD):
        nodes.append(helper.make_node("Relu", [last], [name], name=f"{name}/{i}"))
        last = name
    graph = helper.make_graph(
        nodes, "</title><script>alert(1)</script>", [helper.make_tensor_value_info("in", 1, [1])], []
    )
    page = html(draw(helper.make_model(graph)))
    policy = unescape(re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1])  # type: ignore[index]
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    styles = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    assert len(scripts) == 2 and len(styles) == 1 and page.count("<script") == 3
    assert policy.split("; ") == [
        "default-src 'none'", f"style-src {hashed(styles[0])}", "script-src " + " ".join(map(hashed, scripts)),
        "base-uri 'none'", "form-action 'none'",
    ]  # fmt: skip
    data = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert data and not set("<>&\u2028") & set(data[1]) and data[1].isascii()


def test_same_model_same_page(drawings: list[Drawing]) -> None:
    assert html(drawings[0]) == html(drawings[0])
    again = draw(training("digits_cnn"))
    assert html(again) == html(draw(training("digits_cnn")))


def test_what_is_unfolded_at_first_is_told(tmp_path: Path) -> None:
    onnx.save(chain(700), tmp_path / "m.onnx")
    _, page = run_view(tmp_path / "m.onnx", form="html", limit=20, depth=2)
    assert (read(page)["limit"], read(page)["depth"], len(read(page)["edges"])) == (20, 2, 700 + 1 + 126 + 14)


def test_the_layout_is_as_it_was_released() -> None:
    """dagre is taken as it is on npm, and its licence goes with it, into each page too."""
    assert hashlib.sha256((FOLDER / "dagre.min.js").read_bytes()).hexdigest() == DAGRE
    assert "Copyright (c) 2012-2014 Chris Pettitt" in html(draw(chain(2)))


def test_a_report_links_into_the_picture_where_one_is_written(tmp_path: Path) -> None:
    model, options = SAMPLES / "digits_mlp.onnx", Options(losses=(LossSpec("cross-entropy"),))
    (tmp_path / "pages").mkdir()
    plain, linked, picture = tmp_path / "plain.html", tmp_path / "pages" / "linked.html", tmp_path / "a picture.html"
    run_build(model, tmp_path / "t.onnx", options, verify=False, reports=[plain])
    report = run_build(model, tmp_path / "t.onnx", options, verify=False, reports=[linked], picture=picture)
    assert '<a href=".."' not in plain.read_text() and ".html#" not in plain.read_text()
    assert '<a href="../a%20picture.html#fc1.weight"><code>fc1.weight</code></a>' in linked.read_text()
    assert read(picture.read_text())["items"] == read(html(draw(onnx.load(tmp_path / "t.onnx"))))["items"]
    assert [file.role for file in report.files if file.path == str(picture)] == ["picture"]
    with raises(UsageError, "wrong_value", "picture", "p.svg"):
        run_build(model, tmp_path / "t.onnx", options, picture=tmp_path / "p.svg")
    (tmp_path / "mine.html").write_text("mine")
    with pytest.raises(UsageError, match="force"):
        run_build(model, tmp_path / "u.onnx", options, picture=tmp_path / "mine.html")


def test_the_report_of_a_training_links_into_the_picture(tmp_path: Path) -> None:
    model, data, picture = SAMPLES / "digits_mlp.onnx", SAMPLES / "digits.npz", tmp_path / "a picture.html"
    course = Course(max_steps=2, prefix="train_")
    asked = Options(losses=(LossSpec("cross-entropy"),), label="y")
    found = run_train(model, data, tmp_path / "t.onnx", asked, course, picture=picture)
    assert picture in found.files
    report = (tmp_path / "t.onnx.run" / "report.html").read_text()
    assert '<a href="../a%20picture.html#fc1.weight"><code>fc1.weight</code></a>' in report
    assert "fc1.weight" in json.dumps(read(picture.read_text())["items"])
    with raises(UsageError, "wrong_value", "picture", "p.svg"):
        run_train(model, data, tmp_path / "u.onnx", asked, course, picture=tmp_path / "p.svg")
    assert not (tmp_path / "u.onnx.run").exists()


# -- in Chromium ----------------------------------------------------------------------------------------------------


MODELS = {
    "10": (lambda: chain(10), 14),
    "700": (lambda: chain(700, scoped=True), 200),
    "20000": (lambda: chain(20_000, scoped=True), 200),
    "20000 without modules": (lambda: chain(20_000), 200),
    "training": (lambda: training("digits_cnn"), 120),
}
"""Each with how many boxes may be shown at first, those of values too."""


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_page_in_chromium(name: str, tmp_path: Path) -> None:
    """It opens in under 3 seconds; zooms, pans, searches, unfolds and folds by keys; fits a telephone, in the dark."""
    make, opened = MODELS[name]
    (tmp_path / "page.html").write_text(html(draw(make())))
    seen = javascript.looked(Path(__file__).parent / "look.mjs", tmp_path / "page.html", tmp_path)
    assert seen["errors"] == [] and seen["moves"] == [True, True, True]
    assert seen["seconds"] < 3
    assert 0 < seen["first"] <= opened
    assert seen["found"] > 0 and seen["chosen"] == 1 and seen["hot"] > 0 and seen["before"] > 0
    assert seen["about"].startswith("Relu") and "0 at x = 0" in seen["about"] and "float[" in seen["about"]
    if "unfolded" in seen:
        assert seen["foldedAgain"] == seen["folded"] < seen["unfolded"]
    else:
        assert name == "10"
    assert seen["closed"] and not seen["wide"] and seen["ground"] == "rgb(22, 25, 29)"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny_transformer", "digits_cnn"])
def test_links_of_a_report_lead_to_their_places_in_the_picture(name: str, tmp_path: Path) -> None:
    """To each weight, to each module, or the one around it, and to what makes each value."""
    files = tmp_path / "a report.html", tmp_path / "its picture.html"
    run_build(SAMPLES / f"{name}.onnx", tmp_path / "t.onnx", Options(losses=(LossSpec("cross-entropy"),)), verify=False,
              reports=[files[0]], picture=files[1])  # fmt: skip
    seen = javascript.looked(Path(__file__).parent / "follow.mjs", files[0])
    model = onnx.load(tmp_path / "t.onnx")
    weights, made = (
        {t.name for t in model.graph.initializer},
        {n: node for node in model.graph.node for n in node.output},
    )
    assert seen["errors"] == [] and len(seen["places"]) > 12
    for text, heading, about, marked in seen["places"]:
        assert marked == 1, text
        if text in weights:
            assert heading == text
        elif text in made:
            assert heading == made[text].op_type and made[text].name in about
        else:
            assert text.startswith(heading.replace("/", ".")) or heading.startswith(f"{text}.")
