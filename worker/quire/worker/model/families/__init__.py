"""One function per family: what its ``config.json`` says, as a `ModelSpec`."""
