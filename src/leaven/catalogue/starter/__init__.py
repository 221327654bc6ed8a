"""Derive a starter recipe from published runs and laws (`leaven new`)."""
