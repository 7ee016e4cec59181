"""The block directory (which group holds which KV blocks) and the index behind it."""
