"""Verification of models: compare gradients with finite differences, on two runtimes that share no code with the rules.

The result of a verification is called a proof; see `Proof`.
"""
