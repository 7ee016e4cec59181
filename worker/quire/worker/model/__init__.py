"""Models: configurations, weights, and the operations that a rank runs."""
