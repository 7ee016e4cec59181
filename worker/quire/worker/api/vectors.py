"""Functions of embeddings."""

import numpy as np

from quire.worker.api.arrays import Floats


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
