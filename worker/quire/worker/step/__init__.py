"""The messages of a step: its input, from the engine to its ranks, and its output."""
