"""The optimizer's step, appended to the gradients."""
