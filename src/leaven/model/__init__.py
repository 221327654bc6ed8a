"""Define the decoder-only transformer. It does not depend on parallelism, optimizers or recipe files."""
