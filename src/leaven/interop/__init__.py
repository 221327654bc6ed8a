"""Connects leaven with other software: scaling rules for any torch model, and conversion of weights and
configurations."""
