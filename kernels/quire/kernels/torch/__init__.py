"""Operations in plain PyTorch, for backends and types without a faster kernel."""
