"""Runs steps on one rank: KV cache, CUDA graphs, model and sampler."""
