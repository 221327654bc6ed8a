"""Published training runs and empirical laws. Every number names its source or is marked as from memory."""
