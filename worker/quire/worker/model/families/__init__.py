"""One function per model family, which turns its ``config.json`` into a `ModelSpec`."""
