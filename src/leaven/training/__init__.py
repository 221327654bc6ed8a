"""The loop and what guards it."""
