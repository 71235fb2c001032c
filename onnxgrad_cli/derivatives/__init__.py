"""Models that compute derivatives of a model's outputs, without a loss of ours: one module a way of asking for them.

`onnx_derivative` (module `classic`) has the names and options of the older function; `derive` has every kind of
derivative, forward and reverse, first and second.
"""
