"""LoRA adapters: reading and checking them, storing them on a node, and loading their weights."""
