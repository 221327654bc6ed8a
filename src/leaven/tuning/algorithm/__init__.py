"""The search algorithm, without Optuna and torch. Start with `trust_region.py`, which describes the method."""
