"""Bring any model into the one form the other passes know."""
