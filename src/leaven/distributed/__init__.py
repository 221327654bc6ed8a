"""Distributes a model over ranks. The model itself contains no distributed code."""
