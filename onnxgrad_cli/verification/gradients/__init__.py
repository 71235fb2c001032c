"""Compare gradients with finite differences of the loss, with a tolerance that follows from the noise of both."""
