"""Lays a model out over ranks; the model itself has no code for it."""
