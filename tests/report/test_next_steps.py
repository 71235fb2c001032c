"""The commands and the program at the end of a report run."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import onnx

from onnxgrad_cli.builder import build
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.metadata import describe
from onnxgrad_cli.options import Options
from onnxgrad_cli.report import File, make_report
from tests.report.test_build_report import f32, mlp, model


def test_the_program_in_the_report_runs_and_the_loss_falls(tmp_path: Path) -> None:
    path = tmp_path / 'a "quoted" model.onnx'
    built = build(mlp())
    onnx.save(built.model, path)
    report = make_report(built=built, files=[File.of(path, "training model")])
    (program,) = (step.text for step in report.next if step.language == "python")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path)
    losses = [float(line.split()[1]) for line in done.stdout.splitlines()]
    assert len(losses) == 5
    assert all(after < before for before, after in itertools.pairwise(losses))


def test_the_next_command_trains_with_the_same_loss_and_checks_on_the_same_data() -> None:
    options = Options(losses=[LossSpec("mse", "y", "target")], freeze=("b*",), optimizer="adamw")
    command = "onnxgrad build m.onnx --test-data 'my data.npz'"
    files = [File(path="t.onnx", role="training model", bytes=1, sha256="")]
    report = make_report(built=build(mlp(), options), model="m.onnx", command=command, files=files)
    train, check = (step.text for step in report.next if step.language == "sh")
    assert train == "onnxgrad train m.onnx --loss mse:y:target --freeze 'b*' --optimizer adamw --data DATA"
    assert check == "onnxgrad check t.onnx --data 'my data.npz'"


def test_a_loss_without_a_label_names_none() -> None:
    """`identity` has no label, also where another loss has taken the default one."""
    text = "g (float[N, 3] x) => (float[N, 3] y, float[N, 3] z) { y = Mul(x, w) z = Abs(y) }"
    built = build(model(text, w=f32(3)), Options(losses=(LossSpec("mse", "y"), LossSpec("identity", "z"))))
    assert make_report(built=built).asked.losses == ["mse of 'y' against 'label'", "identity of 'z'"]
    assert [term.label for term in describe(built.model).losses] == ["label", ""]
