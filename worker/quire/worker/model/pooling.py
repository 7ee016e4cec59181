"""How an embedding model turns a text's hidden states into one vector. Does not import torch.

`quire.worker.model.sentence_folder` reads it from a checkpoint.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

PoolingMode = Literal["last", "mean", "cls", "max", "mean_sqrt", "weighted_mean", "classifier"]
"""The last token's state; the mean of all states; the first token's state; the maximum of each
channel; the sum divided by the square root of the number of tokens; the mean weighted by position,
from 1 (Muennighoff 2022); or the logits of the classifier after the encoder."""
Activation = Literal["Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Dense:
    """A linear layer, its activation, and optionally the input added to the result."""

    file: Path
    """The file with its weights."""
    num_in: int
    num_out: int
    activation: Activation
    has_bias: bool = True
    has_residual: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerNorm:
    """A layer norm with weights and biases."""

    file: Path
    size: int


@dataclass(frozen=True, slots=True)
class Normalize:
    """The vector is scaled to length 1."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Only the first ``size`` numbers are kept."""

    size: int


Step = Dense | LayerNorm | Normalize | Cut


@dataclass(frozen=True, kw_only=True, slots=True)
class Pooling:
    """How a text's hidden states are turned into one vector."""

    modes: tuple[PoolingMode, ...]
    """The vectors of all modes are joined, in this order."""
    steps: tuple[Step, ...] = ()
    """Applied to the vector in order."""
    reads_pairs: bool = False
    """Whether a text is a pair of texts, whose token types tell them apart if the model has any."""

    @property
    def is_causal(self) -> bool:
        """Whether a decoder's state at the last token is enough."""
        return self.modes == ("last",)
