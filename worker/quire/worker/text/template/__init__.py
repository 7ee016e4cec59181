"""Chat templates, and checkpoints' templates of answers."""
