"""Is it true? Checks that a rule's promises hold on small models, and that can fail."""
