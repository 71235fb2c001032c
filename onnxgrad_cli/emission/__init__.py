"""The emitter and the class of values with which rules, losses and optimizers write typed nodes."""
