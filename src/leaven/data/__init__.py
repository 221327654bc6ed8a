"""Turn text into tokens, and tokens into an endless stream of samples, the same for any number of processes."""
