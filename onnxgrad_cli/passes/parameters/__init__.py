"""Choose the parameters: the weights to train, and the outputs that the losses are computed on.

- `select`: chooses the float tensors to train, and gives a reason for every other one.
- `constants`: finds initializers that are constants by their role.
- `presets`: groups of weights that an option names: biases, normalizations, the last layers.
- `sharing`: trains weights with equal values as one (`tie`), and splits weights that several modules read (`untie`).
- `patterns`: matches names with the user's globs, and finds the output that each loss is computed on.
"""
