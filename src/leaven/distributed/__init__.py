"""Distributes a model over ranks. The model itself contains no code for this."""
