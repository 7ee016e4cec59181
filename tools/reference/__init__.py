"""Pages of the documentation that are made of the code."""
