"""What a training model costs to run, counted from its types alone: operations, and bytes kept for the backward part.

The figures let a user compare models and batch sizes before running anything. They are counts, not times: a
floating-point operation (FLOP) is one addition or multiplication, so a multiply-add counts as two. What runs at some
runs only (a branch, the step after gathered gradients) counts as if it did at each.
"""
