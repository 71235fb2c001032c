"""The pass that tidies a training model: it removes unused nodes and rewrites others in better forms.

- `cleanup`: the pass.
- `backward_constants`: folds constants of the backward part.
- `faster_forms`: turns a transposed product into the product of the transposed factors, and scaling and shifting of
  channels into a convolution.
- `narrow_kernels`: computes in float32 where onnxruntime has no kernel for bfloat16.
- `optimizer_faults`: rewrites patterns that onnxruntime's optimizer would break.
"""

from onnxgrad_cli.passes.cleanup.cleanup import CLEANUP

__all__ = ["CLEANUP"]
