"""Which numbers of fewer bits weights and KV caches may be kept in. Knows no torch."""

from typing import Literal

Quantization = Literal["int8"]
"""What linear layers may compute in: weights with a scale per output, inputs with one per row."""

KvCacheDType = Literal["auto", "int8", "fp8"]
"""Type of the KV cache: "auto" is the weights' type; int8 has a scale for each token and head."""

SCALE_BYTES = 4
"""A float32 scale, which an int8 cache keeps behind the values of each token and head."""
