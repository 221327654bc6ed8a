"""Recipes as configurations of other trainers, and back. No torch: a file is written on any machine."""
