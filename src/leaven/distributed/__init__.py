"""How a model is laid out over ranks; the model does not know."""
