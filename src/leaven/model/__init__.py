"""Define the decoder-only transformer. It does not depend on parallelism, optimisers or recipe files."""
