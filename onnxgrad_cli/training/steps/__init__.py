"""A training step, in one run or several, and the memory in which weights and state stay."""
