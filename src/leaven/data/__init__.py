"""Turn text into tokens, and tokens into an endless stream whose n-th sample does not depend on the layout of the
run."""
