"""Turn text into an endless stream of token samples, which is the same for any number of processes."""
