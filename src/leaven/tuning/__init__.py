"""Many short runs, one better recipe."""
