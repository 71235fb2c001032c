"""Estimate the cost of one run of a training model from its types: operations, and bytes kept for the backward part.

The figures let a user compare models and batch sizes before running anything. They are counts, not times: a
floating-point operation (FLOP) is one addition or multiplication, so a multiply-add counts as two. Nodes that do not
run in each run (a branch, the optimizer step after accumulated gradients) count as if they did.
"""
