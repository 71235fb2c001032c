"""The model in memory: a graph that passes change, its nodes, the types of its values, and functions on nodes."""
