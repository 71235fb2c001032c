"""The emitter of typed nodes, and the class of values, with which rules, losses and optimizers write graphs."""
