"""How hyperparameters move with scale."""
