"""A run of training as files: its folder, checkpoints, adapters, and the way back to a model."""
