"""Published training runs and empirical laws. Every number names its source, or says that it is from memory."""
