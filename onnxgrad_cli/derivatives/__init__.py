"""Models that compute derivatives of a model's outputs, without a loss of ours: one module a way of asking for them.

`derive` (module `kinds`) has every kind of derivative, forward and reverse, first and second; `compat.onnx_derivative`
has the names and options of an older function.
"""
