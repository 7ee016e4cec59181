"""Paged attention, KV write and a layer's element-wise steps, as pure functions of tensors.

Triton for GPUs, a CPU backend, and a plain-PyTorch twin of each as the oracle.
"""
