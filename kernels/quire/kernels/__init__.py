"""Paged attention, KV write and sampling as pure functions of tensors.

Triton for GPUs, a CPU backend, and a plain-PyTorch twin of each as the oracle.
"""
