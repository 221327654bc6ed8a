"""To and from others: any torch model gets its groups and multipliers from the same rules."""
