"""How many groups there should be."""
