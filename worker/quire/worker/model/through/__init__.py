"""Runs models without a description of Quire's own: transformers' modules on Quire's KV cache.

Only these modules import transformers' models, and only if such a model is run.
"""
