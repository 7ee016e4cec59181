"""Models that Quire does not describe, computed by transformers' modules on Quire's KV cache.

Only these modules import transformers' models, and only where such a model is run.
"""
