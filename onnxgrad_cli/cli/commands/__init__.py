"""One module per command: it parses its options, calls one job and prints the result."""
