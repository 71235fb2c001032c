"""The words that options accept, as Literal types, for type checkers, for `Options` and for the command line.

This module imports no other module of onnxgrad, so that `--help` does not load onnx.
"""

from typing import Literal

Reduction = Literal["mean", "sum"]
Preset = Literal["bias", "norm", "head"]
Init = Literal["keep", "xavier", "he", "normal"]
Recomputation = Literal["elementwise", "block", "budget", "optimal"]
Yield = Literal["ones", "input", "keep"]
Mode = Literal["keep", "train", "eval"]
Quantization = Literal["refuse", "ste", "lsq"]
Scaling = Literal["lora", "rslora"]
TargetName = Literal["standard", "portable", "ort-cpu", "ort-cuda"]
WeightsForm = Literal["stored", "inputs"]
LogForm = Literal["csv", "tensorboard"]
Resume = Literal["never", "auto", "must"]
Resize = Literal["crop", "stretch"]
Augmentation = Literal["flip", "crop"]
Derivative = Literal["vjp", "jvp", "hvp", "gnvp", "jacobian", "hessian", "hessian-diagonal", "laplacian"]
DerivativeNames = Literal["plain", "casadi"]
Explanation = Literal["saliency", "smoothgrad", "integrated-gradients", "grad-cam", "occlusion"]
Attack = Literal["fgsm", "pgd"]
AttackLoss = Literal["cross-entropy", "margin", "dlr"]
Norm = Literal["inf", "2"]

SECOND_DERIVATIVES = ("hvp", "hessian", "hessian-diagonal", "laplacian")
"""The kinds of derivatives that are second derivatives of a sum of outputs."""

WEIGHTED_DERIVATIVES = (*SECOND_DERIVATIVES, "gnvp")
"""The kinds of derivatives for which outputs can have weights."""

SEEDS = 2**24
"""The exclusive upper bound of seeds. ONNX stores a seed as a float, which represents smaller integers exactly."""
