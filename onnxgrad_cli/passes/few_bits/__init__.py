"""Matrices that are stored in few bits: multiplied as such, and as floats only while the backward part uses them.

- `few_bits`: the pass.
- `unpacking`: the backward product with the matrix of a MatMulNBits, unpacked piece by piece.
- `late_floats`: what DequantizeLinear makes, made when it is used.
"""

from onnxgrad_cli.passes.few_bits.few_bits import FEW_BITS

__all__ = ["FEW_BITS"]
