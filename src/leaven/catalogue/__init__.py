"""Published runs and empirical laws. Every number names its source, and says so where it is from memory."""
