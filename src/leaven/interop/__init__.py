"""Connects leaven with other software: applies the scaling rules to any torch model, and converts weights and
configurations."""
