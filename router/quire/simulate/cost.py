"""How long a step takes: for named machines, or fitted to measurements.

    step ms = prefill + decode
    prefill = base + per_token * n + per_token2 * n**2 + per_context * sum of n_i * context_i
    decode  = decode_base + decode_linear * p + decode_quadratic * p**2

n new prompt tokens in the step, n_i those of one prompt and context_i what was computed of it
before, p the tokens that the decodes attend to as a share of the cache, 1 at most: of what
several of them share, each one after the first counts as ``shared_read``. A step without prompt
tokens has no first term, one without decodes no second.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from quire.worker.request.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Milliseconds; see the module's docstring.

    Raises:
        ConfigError: A step would take no time, or less time for more tokens.
    """

    base: float
    per_token: float
    per_token2: float = 0.0
    per_context: float = 0.0
    decode_base: float
    decode_linear: float
    decode_quadratic: float = 0.0
    num_cache_tokens: int
    """KV cache of a group of this kind."""
    kv_bytes_per_token: int = 0
    """Bytes of a token's KV, needed where KV travels."""
    shared_read: float = 1.0
    """Cost of attending to a token for each further decode that attends to the same block, relative
    to the first: 1 if each reads it for itself, 0 if one reads it for all."""

    def __post_init__(self) -> None:
        for name in ("per_token", "per_token2", "per_context"):
            if not getattr(self, name) >= 0:
                raise ConfigError(
                    f"{name}={getattr(self, name):g}: must not be negative, a step would end "
                    "before it began; fit costs to prompts that differ more in length"
                )
        if not 0 <= self.shared_read <= 1:  # Nor is what is not a number.
            raise ConfigError(
                f"shared_read={self.shared_read:g}: must be 0 to 1; 1 where each sequence reads "
                "what it shares for itself, 0 where it is read once for all of them"
            )
        decodes_ms = self.decode_ms(1), self.decode_ms(self.num_cache_tokens)
        if not min(self.prefill_ms(1), *decodes_ms) > 0:
            raise ConfigError(
                f"base={self.base:g}, per_token={self.per_token:g}, decode_base="
                f"{self.decode_base:g}, decode_linear={self.decode_linear:g}: a step must take "
                "some time; fit costs to steps with and without prompts"
            )

    def prefill_ms(self, num_tokens: float) -> float:
        """Time for a prefill of tokens with nothing before them."""
        return self.base + (self.per_token + self.per_token2 * num_tokens) * num_tokens

    def decode_ms(self, num_context: float, num_shared: float = 0) -> float:
        """Time for a step whose decodes attend to ``num_context`` tokens, shared ones counted once
        for each; ``num_shared`` of them follow another decode that attends to the same block."""
        num_read = num_context - (1 - self.shared_read) * num_shared
        fill = min(num_read / self.num_cache_tokens, 1.0)
        return self.decode_base + (self.decode_linear + self.decode_quadratic * fill) * fill

    def slowed(self, factor: float) -> "CostModel":
        """The same machine, slower by ``factor``."""
        return replace(
            self,
            base=self.base * factor,
            per_token=self.per_token * factor,
            per_token2=self.per_token2 * factor,
            per_context=self.per_context * factor,
            decode_base=self.decode_base * factor,
            decode_linear=self.decode_linear * factor,
            decode_quadratic=self.decode_quadratic * factor,
        )


PRESETS: Mapping[str, CostModel] = MappingProxyType(
    {
        # Fitted by NVIDIA for Dynamo's mocker: Llama 3.1 8B on one H100. Its prefill counts new
        # tokens only, whatever lies before them.
        "h100-8b": CostModel(
            base=16.51,
            per_token=0.015175,
            per_token2=4.23e-7,
            decode_base=5.74,
            decode_linear=54.01,
            decode_quadratic=-25.74,
            num_cache_tokens=1_048_576,
            kv_bytes_per_token=131_072,
        ),
        # Computed, not measured: 70e9 weights in bf16 on 4 H200 at 600 TFLOP/s and 80 % of
        # 4.8 TB/s each; 80 layers, 8 KV heads of 128; 65 GB of each for KV cache.
        "h200-70b-tp4": CostModel(
            base=12.0,
            per_token=0.0583,
            per_token2=5.5e-7,
            per_context=1.1e-6,
            decode_base=12.0,
            decode_linear=17.0,
            num_cache_tokens=793_000,
            kv_bytes_per_token=327_680,
        ),
        # Steps of the 125M model of bench/peers on two cores of an EPYC (Zen 4):
        # 816 tokens in 325 ms; one stream 5.5 ms a token.
        "cpu-125m": CostModel(
            base=5.0,
            per_token=0.36,
            per_token2=4.0e-5,
            per_context=8.0e-5,
            decode_base=5.5,
            decode_linear=40.0,
            num_cache_tokens=65_536,
            kv_bytes_per_token=73_728,
        ),
    }
)
