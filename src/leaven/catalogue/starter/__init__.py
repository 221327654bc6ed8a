"""Derive a starter recipe, which is a recipe to start from, out of published runs and laws (`leaven new`)."""
