"""The decoder-only transformer. Knows nothing of parallelism, optimisers or recipe files."""
