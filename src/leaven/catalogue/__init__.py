"""Published runs and empirical laws, every number with its source."""
