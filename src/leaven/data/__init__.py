"""Turn text into tokens, and tokens into an endless stream of training samples.

The stream does not depend on how a run is distributed over processes.
"""
