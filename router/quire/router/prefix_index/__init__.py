"""Which group holds which blocks: the directory and the index that it looks up."""
