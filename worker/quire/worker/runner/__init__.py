"""What one rank does with a step: KV cache, CUDA graphs, the model, the sampler."""
