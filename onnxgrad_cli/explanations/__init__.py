"""Explain and attack models: attributions of a class score to the inputs, and adversarial inputs.

The methods in `attributions` work on a `Case`, which holds samples and computes their scores and gradients.
"""
