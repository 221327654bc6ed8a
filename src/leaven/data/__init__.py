"""Text to tokens to the n-th sample of an infinite, seekable, layout-free stream."""
