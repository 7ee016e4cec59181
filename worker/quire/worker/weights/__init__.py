"""A checkpoint's files: finding tensors, reading a rank's share of them, and their digests."""
