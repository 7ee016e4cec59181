"""A tensor-parallel rank: runs steps on its share of the model and of the KV cache, and samples."""
