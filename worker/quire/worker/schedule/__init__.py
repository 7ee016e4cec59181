"""The scheduler: chooses which sequences run in the next step, and on which blocks."""
