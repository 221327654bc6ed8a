"""Scaling rules: how hyperparameters change from a base to another scale."""
