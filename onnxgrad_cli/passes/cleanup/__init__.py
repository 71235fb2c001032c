"""What nobody reads, removed."""
