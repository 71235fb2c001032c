"""Low-rank adapters outside the training: the files they are kept in, and how an inference model takes them."""
