"""What never ends is not trained; what may end, or takes long, is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import ModelProto

from onnxgrad_cli import Options, build, run_build, run_check, run_evaluate, run_predict
from onnxgrad_cli.errors import UnsupportedError
from onnxgrad_cli.execution.limits import check_ends
from onnxgrad_cli.jobs.train import run_train
from tests.facts import raises


def looping(trips: str, starts: str, goes_on: str) -> ModelProto:
    """A model whose loop has so many trips, a condition at first, and one after each round."""
    return onnx.parser.parse_model(f"""
        <ir_version: 8, opset_import: ["": 17]> g (float[2, 3] x) => (float[2, 3] y)
        <float[3, 3] w = {{1, 0, 0, 0, 1, 0, 0, 0, 1}}, int64 few = {{3}}, int64 many = {{{2**62}}}, bool yes = {{1}},
         float one = {{1}}> {{
            h = MatMul(x, w)
            y = Loop({trips}, {starts}, h) <body = b (int64 i, bool c, float[2, 3] a) => (bool d, float[2, 3] e) {{
                e = Tanh(a) m = ReduceMax<keepdims = 0>(e) n = Less(m, one) t = Identity(yes) d = Identity({goes_on})
            }}>
        }}""")


@pytest.mark.parametrize(
    ("loop", "what"),
    [
        (("many", "yes", "c"), "for 4,611,686,018,427,387,904 iterations"),
        (("many", "", "t"), "for 4,611,686,018,427,387,904 iterations"),
        (("", "yes", "t"), "for ever"),
        (("few", "yes", "c"), ""),
        (("many", "yes", "n"), ""),
        (("", "yes", "n"), ""),
    ],
)
def test_a_loop_that_nothing_ends_is_told(loop: tuple[str, str, str], what: str) -> None:
    built = build(looping(*loop), Options())
    if what:
        with pytest.raises(UnsupportedError, match=rf"\(Loop\) runs {what}"):
            check_ends(built.graph)
    else:
        check_ends(built.graph)


def test_what_never_ends_is_not_trained(tmp_path: Path) -> None:
    onnx.save(looping("many", "yes", "c"), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=np.zeros((2, 3), "f"), label=np.zeros((2, 3), "f"))
    with raises(UnsupportedError, "refused", "Loop_y", "4,611,686,018,427,387,904"):
        run_train(tmp_path / "m.onnx", tmp_path / "d.npz")
    assert {path.name for path in tmp_path.iterdir()} == {"m.onnx", "d.npz"}


@pytest.mark.parametrize("held", [False, True], ids=["initializers", "constants"])
def test_what_never_ends_is_not_run_on_data(held: bool) -> None:
    model = looping("many", "yes", "c")
    if held:  # as exporters write them
        for tensor in list(model.graph.initializer):
            model.graph.node.insert(0, onnx.helper.make_node("Constant", [], [tensor.name], value=tensor))
        del model.graph.initializer[:]
    data = {"x": np.zeros((2, 3), "f"), "label": np.zeros((2, 3), "f")}
    for act in (run_predict, run_evaluate):
        with raises(UnsupportedError, "refused", "Loop_y", "4,611,686,018,427,387,904"):
            act(model, data)
    assert run_predict(looping("few", "yes", "c"), data).samples == 2


def test_what_never_ends_is_not_proved_when_that_is_asked_for(tmp_path: Path) -> None:
    report = run_build(looping("many", "yes", "c"), tmp_path / "train.onnx", verify=True, no_report=True)
    assert report.status == "refused" and "'Loop_y'" in report.error and "4,611,686,018,427,387,904" in report.error
    assert not list(tmp_path.iterdir())
    onnx.save(build(looping("many", "yes", "c"), Options()).model, tmp_path / "train.onnx")
    with raises(UnsupportedError, "refused", "Loop_y", "4,611,686,018,427,387,904"):
        run_check(tmp_path / "train.onnx")
