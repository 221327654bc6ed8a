"""Checks on small models that a scaling rule keeps its promises."""
