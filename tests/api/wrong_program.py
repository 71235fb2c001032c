"""What type checkers must refuse: each line with `# wrong` is an error, and no other line is."""

from __future__ import annotations

import onnxgrad_cli
from onnxgrad_cli import Course, LoraSpec, LossSpec, Options, RecomputeSpec, build, derive

Options(mode="Train")  # wrong
Options(reduction="avg")  # wrong
Options(quantization="STE")  # wrong
Options(init="kaiming")  # wrong
Options(yield_="one")  # wrong
Options(preset=("biases",))  # wrong
Options(target="ort")  # wrong
Options(train="*.bias")  # wrong
Options(losses=LossSpec("mse"))  # wrong
Options(losses=("mse",))  # wrong
Options(lora=8)  # wrong
Options(dims={"batch": "four"})  # wrong
Options(clip=1.0)  # wrong
Options((), "y", None, "mean", None, {}, 0.0, "l2")  # wrong
Course(epoch=3)  # wrong
LoraSpec("8")  # wrong
LossSpec("mse", weight="2")  # wrong
RecomputeSpec("blocks")  # wrong
Course(init="kaiming")  # wrong
build(3)  # wrong
derive("model.onnx", "hessians")  # wrong
print(build("model.onnx").trained)  # wrong
print(onnxgrad_cli.nothing)  # wrong
