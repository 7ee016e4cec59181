"""LoRA adapters: which are read, where they are kept, and what they add to a model's layers."""
