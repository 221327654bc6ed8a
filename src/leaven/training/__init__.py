"""Trains models: the training loop, its callbacks, checkpoints and run folders."""
