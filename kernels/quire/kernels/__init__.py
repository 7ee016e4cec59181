"""Compute kernels: paged attention, KV write, linear layers, sampling and element-wise operations.

There are Triton kernels for GPUs, a CPU backend, and a plain-PyTorch twin of each as the oracle.
"""
