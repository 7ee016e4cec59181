"""Dense layers after pooling, as in sentence-transformers. Does not import torch."""

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from quire.worker.api.arrays import Floats
from quire.worker.api.errors import CheckpointError
from quire.worker.model.pooling import Dense


class DenseLayer:
    """A layer with its weights, in float32."""

    def __init__(self, dense: Dense) -> None:
        """Raises CheckpointError: the tensors in the file are not those of the layer."""
        try:
            tensors = load_file(dense.file)
        except (OSError, SafetensorError, TypeError, KeyError) as error:
            raise CheckpointError(f"{dense.file} cannot be read: {error}") from error
        weight_OI = tensors.get("linear.weight")
        bias_O = tensors.get("linear.bias", np.zeros(dense.num_out, np.float32))
        shapes = [None if weight_OI is None else weight_OI.shape, bias_O.shape]
        if weight_OI is None or shapes != [(dense.num_out, dense.num_in), (dense.num_out,)]:
            raise CheckpointError(
                f"{dense.file}: linear.weight and linear.bias have the shapes {shapes}, and "
                f"config.json says {dense.num_in} inputs and {dense.num_out} outputs"
            )
        self._weight_OI: Floats = weight_OI.astype(np.float32)
        self._bias_O: Floats = bias_O.astype(np.float32)
        self._activation = dense.activation

    def __call__(self, vector_I: Floats) -> Floats:
        out_O: Floats = self._weight_OI @ vector_I + self._bias_O
        if self._activation == "Tanh":
            return np.tanh(out_O)
        return np.maximum(out_O, 0) if self._activation == "ReLU" else out_O
