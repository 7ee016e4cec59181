"""LoRA adapters: reading and checking them, storing them on a node, and the slots of the ranks."""
