"""A run of training as files: its folder, checkpoints, and the way back to a model."""
