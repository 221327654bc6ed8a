"""Connects leaven with other software: scaling rules for users' torch models, conversion of weights and configs."""
