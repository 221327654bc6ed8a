"""Scaling rules: how hyperparameters change from the scale at which they were tuned (the base) to another scale."""
