"""Checks that test a scaling rule by training small models."""
