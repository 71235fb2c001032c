"""The model under work: a mutable graph over the protobuf, the types of its values, and what is read off its nodes."""
