"""The types of the arrays that steps are made of."""

from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

DTYPES: dict[Any, np.dtype[Any]] = {
    Ints: np.dtype(np.int32),
    Longs: np.dtype(np.int64),
    Floats: np.dtype(np.float32),
}
"""The dtype of each array type. NumPy versions differ in what the annotation tells of it."""
