"""The closed sets of words that options take: for type checkers, for the checks of `Options` and for the command line.

Nothing is imported here, so that the command line's help has them without loading onnx.
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
Derivative = Literal["vjp", "jvp", "hvp", "jacobian", "hessian"]
DerivativeNames = Literal["plain", "casadi"]
Explanation = Literal["saliency", "smoothgrad", "integrated-gradients", "grad-cam", "occlusion"]
Attack = Literal["fgsm", "pgd"]
Norm = Literal["inf", "2"]

SEEDS = 2**24
"""Seeds lie below it: a seed is an attribute of type float, which holds such whole numbers exactly."""
