"""Functions of embeddings."""

import numpy as np

from quire.worker.request.arrays import Floats
from quire.worker.request.scoring import Similarity


def normalized(vector_C: Floats) -> Floats:
    """The vector scaled to length 1; a zero vector stays zero."""
    wide_C = vector_C.astype(np.float64)
    length = float(np.sqrt((wide_C * wide_C).sum()))
    return (wide_C / max(length, 1e-12)).astype(np.float32)


def cosine(first_C: Floats, second_C: Floats) -> float:
    """The cosine of the angle between two vectors; 0 if one of them is zero."""
    first, second = first_C.astype(np.float64), second_C.astype(np.float64)
    length = float(np.sqrt((first @ first) * (second @ second)))
    return float(first @ second) / length if length else 0.0


def similarity(first_C: Floats, second_C: Floats, kind: Similarity) -> float:
    """How alike two vectors are: greater is more alike. Distances are negated, as in
    sentence-transformers."""
    if kind == "cosine":
        return cosine(first_C, second_C)
    first, second = first_C.astype(np.float64), second_C.astype(np.float64)
    if kind == "dot":
        return float(first @ second)
    apart = first - second
    return -float(np.sqrt(apart @ apart) if kind == "euclidean" else np.abs(apart).sum())
