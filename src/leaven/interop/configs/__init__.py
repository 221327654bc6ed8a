"""Converts recipes to configurations of other trainers, and back. This package does not import torch."""
