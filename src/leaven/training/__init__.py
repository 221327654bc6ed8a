"""The training loop, its callbacks, checkpoints and run folders."""
