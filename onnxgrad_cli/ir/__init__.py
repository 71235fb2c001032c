"""The model in memory: a mutable graph over the protobuf message, the types of its values, and functions on nodes."""
