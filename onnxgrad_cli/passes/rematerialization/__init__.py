"""Values of the forward part that are computed again in the backward part instead of being kept."""
