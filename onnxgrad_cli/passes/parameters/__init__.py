"""The choice of parameters: which weights are trained, and which outputs the losses are computed of.

- `select`: which float tensors are trained, and for every other one the reason why not.
- `constants`: initializers that are constants by the role they play.
- `presets`: groups of weights that an option names: biases, normalizations, the last layers.
- `patterns`: names that the user chooses by globs.
- `outputs`: the output that each loss is computed of.
"""
