"""Which sequences run in the next step, on which blocks."""
