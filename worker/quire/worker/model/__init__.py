"""Models: their descriptions, their weights, and the operations that a rank runs."""
