"""Build models that compute derivatives of a model's outputs, without a loss.

`derive` (in the module `kinds`) builds every kind of derivative: of first and second order, in forward and reverse
mode. `compat.onnx_derivative` offers them under the name and options of an older function.
"""
