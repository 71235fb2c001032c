"""What nobody reads, removed.

- `cleanup`: the pass.
- `transposed_products`: a transposed product becomes the product of the transposed factors.
- `scaled_channels`: what scales and shifts channels becomes a convolution.
- `cubic_layout`: a view that keeps transposes away from a cubic Resize.
"""

from onnxgrad_cli.passes.cleanup.cleanup import CLEANUP

__all__ = ["CLEANUP"]
