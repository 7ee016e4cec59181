"""The definition of what kernels compute, in readable plain PyTorch: their oracle."""
