"""Embeddings, reranking and scores: their routes, and how groups are asked for vectors.

`api` has the routes and bodies; `embed` makes vectors, scores and orders of one model.
"""
