"""Embeddings, reranking and scores: their routes, and how groups are asked for vectors."""
