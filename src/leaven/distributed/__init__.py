"""Distributes a model over ranks. The model itself does not communicate."""
