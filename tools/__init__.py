"""Tools for contributors.

`python -m tools` generates pages and pictures of docs/, `tools.digests` compares builds, and `tools.verify_op` compares
the gradient of one operator with its Jacobian or with PyTorch's gradient.
"""
