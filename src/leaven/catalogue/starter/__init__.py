"""Derive a recipe to start from (a starter recipe) from published runs and laws (`leaven new`)."""
