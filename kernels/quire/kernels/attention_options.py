"""What some models and caches ask of attention beyond the plain causal kind."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """Attention options of one layer. The defaults are plain causal attention.

    Raises:
        ValueError: A value is out of its range; the message names field, value and range.
    """

    window: int | None = None
    """A query sees this many tokens at most, itself the last of them; ``None`` is all."""
    lookahead: int = 0
    """A query also sees this many tokens of its sequence behind itself, as in encoders. Their K and
    V are there: a step computes such a sequence as a whole."""
    soft_cap: float | None = None
    """Scores become ``soft_cap * tanh(score / soft_cap)``, as in Gemma 2; ``None`` leaves them."""
    sinks: tuple[float, ...] | None = None
    """A score of each query head that stands for no token: one more term in the sum by which
    softmax divides, as in gpt-oss; ``None`` is none."""
    k_scale: float = 1.0
    """A cache of float8_e4m3fn holds K divided by this; other caches hold it as it is."""
    v_scale: float = 1.0
    """Likewise of V."""

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"window={self.window}: must be at least 1, or None for all tokens")
        if self.lookahead < 0:
            raise ValueError(f"lookahead={self.lookahead}: must be 0 or more")
        for name in ("soft_cap", "k_scale", "v_scale"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name}={value}: must be a positive finite number")
        if not all(map(math.isfinite, self.sinks or ())):
            raise ValueError(f"sinks={self.sinks}: must be finite numbers")

    @cached_property
    def sinks_H(self) -> npt.NDArray[np.float32] | None:
        """The same as one array, which lives as long as these options."""
        return None if self.sinks is None else np.array(self.sinks, np.float32)


PLAIN = AttentionOptions()
