"""LoRA adapters: loaded at gateways by name, given to groups, run with requests."""
