"""Verify the gradient of one operator on examples: `python -m tools.verify_op OP`."""
