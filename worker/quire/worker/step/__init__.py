"""A step as it travels from the engine to its ranks, and its output back."""
