"""A training run: its folder with checkpoints and logs, its events, and its response to interrupts."""
