"""Options of attention: windows, soft caps, sinks, and the scales of float8 caches."""

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
    """The most tokens that a query attends to, itself the last; ``None`` for all."""
    lookahead: int = 0
    """A query also attends to this many later tokens of its sequence, as in encoders. Their K and V
    exist, because a step computes such a sequence as a whole."""
    soft_cap: float | None = None
    """Scores become ``soft_cap * tanh(score / soft_cap)``, as in Gemma 2; ``None`` for no cap."""
    sinks: tuple[float, ...] | None = None
    """Attention sinks, as in gpt-oss: for each query head a score that belongs to no token and adds
    one term to softmax's denominator. ``None`` for no sinks."""
    k_scale: float = 1.0
    """A cache of float8_e4m3fn holds K divided by this; other caches ignore it."""
    v_scale: float = 1.0
    """A cache of float8_e4m3fn holds V divided by this; other caches ignore it."""

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
        """``sinks`` as an array, which lives as long as these options."""
        return None if self.sinks is None else np.array(self.sinks, np.float32)


PLAIN = AttentionOptions()
