"""Derive a recipe to start from, a starter recipe, out of published runs and laws (`leaven new`)."""
