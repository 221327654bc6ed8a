"""Turn text into tokens, and tokens into an endless stream of samples that does not depend on the layout of the
run."""
