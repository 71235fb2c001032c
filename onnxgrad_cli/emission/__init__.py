"""How rules, losses and optimizers write: values with operators, and the emitter of typed nodes."""
