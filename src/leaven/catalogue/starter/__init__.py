"""A recipe to start from: `leaven new`."""
